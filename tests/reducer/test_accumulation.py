"""Gradients of one rank alone, between averages."""

from __future__ import annotations

import torch
from tests.reducer.test_bucket_memory import Allocator

from unisono.reducer.accumulation import Accumulation
from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.scattered_gradient import ScatteredGradient


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


def test_blocks_nest() -> None:
    accumulation = Accumulation(memory_of(3))
    with accumulation.no_sync():
        with accumulation.no_sync():
            assert not accumulation.averages
        assert not accumulation.averages
    assert accumulation.averages


def test_averages_and_placeholders_are_not_the_ranks_own_gradients() -> None:
    memory = memory_of(3, 2)
    accumulation = Accumulation(memory)
    assert not accumulation.has_gradients()
    memory.parameters[0].grad = memory.views[0]
    memory.parameters[1].grad = ScatteredGradient(memory.parameters[1], "b")
    assert not accumulation.has_gradients()
    accumulation.accumulated = True
    assert accumulation.has_gradients()  # added to the average
    accumulation.accumulated = False
    memory.parameters[1].grad.zero_()
    assert not accumulation.has_gradients()
    memory.parameters[1].grad = torch.zeros(2)
    assert accumulation.has_gradients(), "the program has computed them"
    memory.parameters[1].grad += 1
    assert accumulation.has_gradients()
    torch.optim.SGD(memory.parameters, foreach=True).zero_grad(set_to_none=False)
    assert not accumulation.has_gradients()
    with torch.inference_mode():
        memory.parameters[1].grad = torch.ones(2)
    assert accumulation.has_gradients()


def summed(memory: BucketMemory) -> Accumulation:
    """Sums of two ranks, 6 in each element of both parameters."""
    accumulation = Accumulation(memory, summands=2)
    for parameter in memory.parameters:
        parameter.grad = torch.full_like(parameter, 6.0)
    accumulation.end_average()
    return accumulation


def test_a_rank_has_its_share_of_an_earlier_sum_once() -> None:
    memory = memory_of(3, 2)
    accumulation = summed(memory)
    for _ in range(2):  # before a gradient is added to it, and after
        assert not accumulation.take_share(0, contributes=True)
    assert [set(parameter.grad.tolist()) for parameter in memory.parameters] == [{3.0}, {6.0}]
    accumulation.end_average()
    accumulation.take_share(0, contributes=True)
    assert set(memory.parameters[0].grad.tolist()) == {1.5}


def test_a_gradient_that_the_program_sets_after_a_step_is_no_share() -> None:
    """As by torch.autograd.grad: it is this rank's own, beside a sum that was not cleared."""
    memory = memory_of(3, 2)
    accumulation = summed(memory)
    memory.parameters[1].grad = memory.views[1]
    memory.views[1].fill_(6.0)
    with torch.no_grad():
        memory.parameters[0].add_(1)
    for index in (0, 1):
        accumulation.take_share(index, contributes=True)
    assert [set(parameter.grad.tolist()) for parameter in memory.parameters] == [{6.0}, {3.0}]


def test_a_rank_without_samples_has_its_share_alone_until_a_step() -> None:
    memory = memory_of(3, 2)
    accumulation = summed(memory)
    assert accumulation.take_share(0, contributes=False)
    assert accumulation.take_share(0, contributes=False)
    assert accumulation.changes() == 0
    with torch.no_grad():
        memory.parameters[0].add_(1)
    assert accumulation.changes() == 1
    assert not accumulation.take_share(1, contributes=False)  # the others have made new ones since
    assert [set(parameter.grad.tolist()) for parameter in memory.parameters] == [{3.0}, {6.0}]


def test_means_and_removed_gradients_have_no_shares() -> None:
    memory = memory_of(3)
    accumulation = summed(memory)
    memory.parameters[0].grad = None
    assert not accumulation.take_share(0, contributes=False)
    means = Accumulation(memory)
    memory.parameters[0].grad = torch.ones(3)
    means.end_average()
    assert not means.take_share(0, contributes=True)
    assert memory.parameters[0].grad.tolist() == [1.0] * 3
