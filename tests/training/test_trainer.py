"""What each step took, and what all took; a step that times convolutions."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.compute import convolution_plan
from unisono.compute.algorithms import DEFAULT
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import prepare
from unisono.training import trainer as module
from unisono.training.trainer import CONCURRENT_KINDS, KINDS, SEQUENTIAL_KINDS, Recorder, warm_up

QUARTERS = st.integers(0, 1000).map(lambda quarter: quarter / 4)  # their sums are exact in float32


def test_time_is_added_even_when_the_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((1.0, 3.5))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    recorder = Recorder()
    with pytest.raises(ValueError, match="so it is"), recorder.record("loading"):
        raise ValueError("so it is")
    assert recorder.split() == {**dict.fromkeys(KINDS, 0.0), "loading": 2.5}


def test_the_kinds_are_those_ahead_and_then_those_beside() -> None:
    assert KINDS == (*SEQUENTIAL_KINDS, *CONCURRENT_KINDS) == tuple(Recorder().split())
    with pytest.raises(KeyError):
        Recorder().add("sleeping", 1.0)


@given(steps=st.lists(st.lists(st.tuples(st.sampled_from(KINDS), QUARTERS), max_size=6), max_size=8), data=st.data())
def test_each_step_has_what_was_added_in_it(steps: list[list[tuple[str, float]]], data: st.DataObject) -> None:
    """Whenever they are taken: each step once."""
    recorder, taken = Recorder(), [np.empty((0, len(KINDS)), np.float32)]
    for added in steps:
        for kind, seconds in added:
            recorder.add(kind, seconds)
        recorder.end_step()
        if data.draw(st.booleans()):
            taken.append(recorder.take_steps())
    recorder.add("loading", 0.5)  # of a step that has not ended
    taken.append(recorder.take_steps())
    recorded = np.concatenate(taken)
    expected = [[sum(seconds for kind, seconds in added if kind == name) for name in KINDS] for added in steps]
    assert recorded.dtype == np.float32
    assert recorded.tolist() == expected
    totals = dict(zip(KINDS, recorded.sum(axis=0).tolist(), strict=True))
    assert recorder.split() == {**totals, "loading": totals["loading"] + 0.5}


def test_nothing_taken_has_its_shape_too() -> None:
    assert Recorder().take_steps().shape == (0, len(KINDS))


def test_steps_that_nobody_takes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many the newest half at least are there."""
    monkeypatch.setattr(module, "MAX_STEPS_RECORDED", 8)
    recorder, most = Recorder(), 0
    for step in range(50):
        recorder.add("computing", float(step))
        recorder.end_step()
        most = max(most, len(recorder._steps) // len(KINDS))
    assert most == 8
    seconds = recorder.take_steps()[:, KINDS.index("computing")].tolist()
    assert 4 <= len(seconds) <= 8
    assert seconds == [float(step) for step in range(50 - len(seconds), 50)]


class Others:
    """A world with a second rank, that has measured this."""

    def __init__(self, measured: dict[str, dict[str, float]]) -> None:
        self._measured = measured

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self._measured]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    model, plan = network(), ConvolutionPlan()
    prepare(model, plan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world: Any = Others({})
    warm_up(model, torch.zeros(2, 3, 6, 6), plan, world, nullcontext)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.frozen
    assert len(plan.measured) == 2  # forward and the weight's gradient: nobody asks for that of the inputs


class Seen(nn.Module):
    """Counts its batches in a buffer that it sets anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches = self.batches + 1
        return inputs


def test_buffers_that_are_assigned_are_left_as_they_were() -> None:
    model, world = nn.Sequential(Seen(), nn.Flatten(), nn.Linear(12, 2)), Others({})
    warm_up(model, torch.zeros(2, 3, 2, 2), ConvolutionPlan(), cast("Any", world), nullcontext)
    assert float(model[0].batches) == 0


def test_all_ranks_choose_the_same_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    model, plan = network(), ConvolutionPlan()
    prepare(model, plan)
    others = {"a": {DEFAULT: 1.0}}
    world: Any = Others(others)
    warm_up(model, torch.zeros(0, 3, 6, 6), plan, world, nullcontext)
    assert plan.measured == others
