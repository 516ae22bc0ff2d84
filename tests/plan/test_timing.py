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


def test_a_layer_that_takes_no_longer_for_more_samples_is_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the samples took longer than all, by chance: no more than the layer takes."""
    monkeypatch.setattr(timing, "trace_values", lambda model, inputs, within: per_sample(model, [(1,) * 9], within))
    _, seconds = time_layers(nn.Sequential(nn.Linear(4, 2)), (torch.ones(8, 4),), nullcontext, 1)
    assert seconds[1].tolist() == [24.0, 90.0, 24.0, 90.0]


def test_only_the_samples_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are no tensors of as many samples stay as they are."""
    seen = list[tuple[int, ...]]()

    def look(model: nn.Module, inputs: Sequence[Any], within: AbstractContextManager[Any]) -> Trace:
        seen.append(tuple(len(each) for each in inputs))
        return per_sample(model, inputs, within)

    monkeypatch.setattr(timing, "trace_values", look)
    time_layers(nn.Linear(4, 2), (torch.ones(8, 4), torch.ones(8), torch.ones(4, 4), "mean"), nullcontext, 1)
    assert seen == [(8, 8, 4, 4)] * 2 + [(4, 4, 4, 4)] * 2


def test_models_that_take_no_half_of_the_samples_have_no_such_part() -> None:
    norm = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    with pytest.raises(UsageError):
        trace_values(norm, (torch.ones(1, 4),), nullcontext())
    for samples in (1, 2):
        model = norm if samples == 2 else nn.Sequential(nn.Linear(4, 2))
        seconds = time_layers(model, (torch.ones(samples, 4),), nullcontext, 1)[1]
        assert seconds[1, :2].min() > 0
        assert not seconds[:, 2:].any()
