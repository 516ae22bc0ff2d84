"""Gradients of one rank alone, between averages."""

from __future__ import annotations

import torch

from unisono.reducer.accumulation import Accumulation
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.scattered_gradient import ScatteredGradient


class Allocator:
    """World that only allocates."""

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)


def memory_of(*lengths: int) -> BucketMemory:
    memory = BucketMemory([torch.nn.Parameter(torch.zeros(length)) for length in lengths], Allocator())  # type: ignore[arg-type]
    memory.lay_out(range(len(lengths)), 1 << 10)
    return memory


def test_passes_accumulate_within_the_block_and_until_the_next_average() -> None:
    accumulation = Accumulation(memory_of(3))
    assert not accumulation.accumulates
    with accumulation.no_sync():
        assert accumulation.accumulates
        assert not accumulation.averages
        accumulation.accumulated = True
    assert accumulation.averages
    assert accumulation.accumulates
    accumulation.accumulated = False
    assert not accumulation.accumulates


def test_averages_and_placeholders_are_not_the_ranks_own_gradients() -> None:
    memory = memory_of(3, 2)
    accumulation = Accumulation(memory)
    assert not accumulation.has_gradients()
    memory.parameters[0].grad = memory.views[0]
    memory.parameters[1].grad = ScatteredGradient(memory.parameters[1])
    assert not accumulation.has_gradients()
    accumulation.accumulated = True
    assert accumulation.has_gradients()  # added to the average
    accumulation.accumulated = False
    memory.parameters[1].grad = torch.ones(2)
    assert accumulation.has_gradients()
