"""Steps are timed on a copy, and what weights take of a layer's time is told from what samples take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.plan import timing
from unisono.plan.timing import time_layers, time_steps
from unisono.plan.trace import Trace, TracedLayer, trace_values


def test_whole_steps_are_timed_on_a_copy() -> None:
    model, begun = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.Linear(5, 2)), list[int]()
    before, random_numbers = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    steps = time_steps(model, (torch.ones(4, 3),), nullcontext, 3, lambda: begun.append(1))
    assert (len(steps), len(begun)) == (3, 4)
    assert all(min(step) > 0 for step in steps)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_numbers)


def per_sample(model: nn.Module, inputs: Sequence[Any], within: AbstractContextManager[Any]) -> Trace:
    """Trace of a layer that takes 6 s and 2 s a sample forward, 10 s a sample backward."""
    seconds = {"forward_seconds": 6.0 + 2 * len(inputs[0]), "backward_seconds": 10.0 * len(inputs[0])}
    return Trace([TracedLayer("0", "Linear", **seconds)], frozenset({"0"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [2, 3, 8, 9])
def test_what_no_sample_takes_is_that_of_the_weights(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "trace_values", per_sample)
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    traced, seconds = time_layers(model, (torch.ones(samples, 4),), nullcontext, 3)
    assert [name for name, _ in model.named_modules()] == ["", "0", "1"]
    assert seconds[1].tolist() == pytest.approx([6.0 + 2 * samples, 10.0 * samples, 6.0, 0.0])
    assert not seconds[[0, 2]].any()
    assert traced.once == {"0"}


def test_what_is_not_cut_has_no_part_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of samples, and tensors of other rows, which may number those of the first."""
    seen = list[int]()

    def look(model: nn.Module, inputs: Sequence[Any], within: AbstractContextManager[Any]) -> Trace:
        seen.append(len(inputs[0]))
        return per_sample(model, inputs, within)

    monkeypatch.setattr(timing, "trace_values", look)
    rows, other = torch.ones(8, 4), torch.ones(2, 8)
    for inputs in ((list(rows),), (rows, other), (rows, (rows,)), (rows, torch.tensor(1.0)), (rows[:1],)):
        assert not time_layers(nn.Linear(4, 2), inputs, nullcontext, 1)[1][:, 2:].any()
    assert 4 not in seen
    assert time_layers(nn.Linear(4, 2), (rows, rows[:, 0], "mean"), nullcontext, 1)[1].shape == (1, 4)
    assert seen[-4:] == [8, 4, 8, 4]


def test_ranks_agree_that_all_take_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has one sample, or its model takes no half of them: all make as many passes."""
    monkeypatch.setattr(timing, "trace_values", per_sample)
    model, inputs = nn.Sequential(nn.Linear(4, 2)), (torch.ones(8, 4),)
    for others in ([False], [True, False]):
        answers, asked = list(reversed(others)), list[bool]()

        def agreed(able: bool, answers: list[bool] = answers, asked: list[bool] = asked) -> bool:
            asked.append(able)
            return answers.pop()

        assert not time_layers(model, inputs, nullcontext, 1, agreed)[1][:, 2:].any()
        assert asked == [True] * len(others)


def test_models_that_take_no_half_of_the_samples_have_no_such_part() -> None:
    norm = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(UsageError):
        trace_values(norm, (torch.ones(1, 4),), nullcontext())
    for samples in (1, 2):
        model = norm if samples == 2 else nn.Sequential(nn.Linear(4, 2))
        seconds = time_layers(model, (torch.ones(samples, 4),), nullcontext, 1)[1]
        assert seconds[1, :2].min() > 0
        assert not seconds[:, 2:].any()
