"""A trace has each module's own calls and sizes, and leaves the model as it was."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from unisono.tensor_parallel.trace import REPETITIONS, samples_of, trace_forward


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(6, 3))


def test_modules_are_listed_as_they_are_called() -> None:
    found = trace_forward(network(), torch.zeros(5, 4), nullcontext)
    assert list(found) == ["", "0", "1", "2", "3", "4"]
    assert [one.calls for one in found.values()] == [1] * 6
    assert [one.backward for one in found.values()] == [False, False, True, True, True, True]
    first = found["0"]
    assert first.inputs is not None
    assert first.outputs is not None
    assert (first.inputs.shape, first.outputs.shape, first.outputs.device.type) == ((5, 4), (5, 6), "meta")
    assert all(len(one.seconds) == REPETITIONS and min(one.seconds) > 0 for one in found.values())


def test_a_module_that_is_called_twice_has_both_calls() -> None:
    relu = nn.ReLU()
    found = trace_forward(nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu), torch.zeros(2, 4), nullcontext)
    assert found["1"].calls == 2
    assert "3" not in found
    assert len(found["1"].seconds) == REPETITIONS


def test_the_model_and_the_random_numbers_stay_as_they_were() -> None:
    model = network()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    random = torch.get_rng_state()
    trace_forward(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), nullcontext)
    assert torch.equal(random, torch.get_rng_state())
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in model.modules())
    assert all(one.grad is None for one in model.parameters())


def test_hooks_are_removed_where_a_pass_fails() -> None:
    model = network()
    with pytest.raises(RuntimeError):
        trace_forward(model, torch.zeros(5, 7), nullcontext)
    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in model.modules())


def test_several_arguments_are_a_tuple() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    example = torch.zeros(3, 2), torch.zeros(3, 2)
    assert samples_of(example) == samples_of(example[0]) == 3
    assert list(trace_forward(Sum(), example, nullcontext)) == [""]
