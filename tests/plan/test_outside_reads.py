"""Parameters that are read while their module does not run are found, however they are read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.plan.outside_reads import OutsideReads
from unisono.plan.trace import trace_shapes, trace_values

Read = Callable[[nn.Linear, Tensor], object]


class Reading(nn.Module):
    """Linear layer, and a read of it afterwards."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.fc, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> object:
        return self.read(self.fc, self.fc(x))


@pytest.mark.parametrize(
    "read",
    [
        lambda fc, y: functional.linear(y, fc.weight),
        lambda fc, y: functional.linear(y, weight=fc.weight),
        lambda fc, y: y @ fc.weight.t(),
        lambda fc, y: torch.cat([y, fc.weight]),
        lambda fc, y: y + fc.weight.data.sum(),
        lambda fc, y: y.view(-1, fc.weight.shape[0]),
        lambda fc, y: (y, {"weight": fc.weight}),
        lambda fc, _: fc.bias,
    ],
)
def test_reads_by_functions_methods_and_results_are_found(read: Read) -> None:
    assert trace_shapes(Reading(read), torch.zeros(2, 4)).once == {""}


@pytest.mark.parametrize(
    "read",
    [
        lambda _, y: y,
        lambda fc, y: y.to(fc.weight.device, fc.weight.dtype),
    ],
)
def test_calls_and_what_a_part_has_too_are_not(read: Read) -> None:
    assert "fc" in trace_shapes(Reading(read), torch.zeros(2, 4)).once


def test_hooks_read_outside() -> None:
    before, after = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    before[0].register_forward_pre_hook(lambda layer, _: layer.weight.sum() and None)
    after[0].register_forward_hook(lambda layer, *_: layer.weight.sum() and None)
    for model in (before, after):
        assert trace_values(model, (torch.zeros(2, 4),), nullcontext()).once == {""}


def test_modules_that_run_may_read() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    reads = OutsideReads(model)
    with reads:
        reads.running.append("1")
        assert model[1].weight.sum() is not None
        assert reads.found == set()
        assert model[0].weight.sum() is not None
    assert reads.found == {"0"}
    assert model[1].weight.sum() is not None  # after it, nothing is watched
    assert reads.found == {"0"}
