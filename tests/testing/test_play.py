"""Collectives of ranks in one process: what each member gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.schedules.pieces import bounds
from unisono.step.predict import Member
from unisono.step.program import COMMUNICATION, Operation, Role, Task
from unisono.testing.play import InProcessWorld, carry_out


def call(ranks: int, act: Callable[[InProcessWorld], Any]) -> list[Any]:
    """Return what `act` returns on each of so many ranks, which call it together."""
    results: list[Any] = [None] * ranks

    def store(_: Any, __: Task, world: Any) -> None:
        results[world.rank] = act(world)

    operation = Operation("call", store, role=Role.COLLECTIVE)
    task = Task(operation, 1, COMMUNICATION)
    carry_out([None] * ranks, [Member(rank, task) for rank in range(ranks)])
    return results


def own(world: InProcessWorld, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 100 * world.rank


@settings(max_examples=20)
@given(ranks=st.integers(1, 5), length=st.integers(1, 12))
def test_a_reduce_scatter_and_an_all_gather_are_an_allreduce(ranks: int, length: int) -> None:
    def both(world: InProcessWorld) -> torch.Tensor:
        return world.all_gather(world.reduce_scatter(own(world, length)), torch.empty(length))

    total = ranks * torch.arange(length) + 100 * sum(range(ranks))
    for composed, allreduced in zip(
        call(ranks, both), call(ranks, lambda world: world.allreduce(own(world, length))), strict=True
    ):
        assert torch.equal(composed, allreduced)
        assert torch.equal(composed, total.float())


def test_a_wire_rounds_each_chunk_twice() -> None:
    term = torch.full((4,), 1 + 2**-9)  # between two numbers of bfloat16
    for result in call(2, lambda world: world.allreduce(term.clone(), wire="bfloat16")):
        assert result.tolist() == [2.0] * 4
    for rank, chunk in enumerate(call(2, lambda world: world.reduce_scatter(term.clone(), wire="bfloat16"))):
        assert chunk.tolist() == [2.0] * (bounds(4, 2, rank)[1] - bounds(4, 2, rank)[0])


def test_chunks_and_tensors_go_to_their_ranks() -> None:
    assert [tensor.tolist() for tensor in call(2, lambda world: world.all_to_all(own(world, 4)))] == [
        [0, 1, 100, 101],
        [2, 3, 102, 103],
    ]
    broadcast = call(3, lambda world: world.broadcast(own(world, 2), root=1))
    assert [tensor.tolist() for tensor in broadcast] == [[100, 101]] * 3
    assert call(3, lambda world: world.all_gather_object(world.rank)) == [[0, 1, 2]] * 3
    assert call(2, InProcessWorld.barrier) == [None, None]


def test_a_pair_swaps_or_one_sends() -> None:
    def swap(world: InProcessWorld) -> list[float]:
        came = torch.empty(2)
        world.swap(own(world, 2), came)
        return came.tolist()

    def send(world: InProcessWorld) -> list[float]:
        came = torch.zeros(2)
        if world.rank:
            world.receive(came)
        else:
            world.send(own(world, 2))
        return came.tolist()

    assert call(2, swap) == [[100, 101], [0, 1]]
    assert call(2, send) == [[0, 0], [0, 1]]


def test_the_error_of_one_member_ends_the_others_and_is_raised() -> None:
    def fail(world: InProcessWorld) -> None:
        if world.rank == 1:
            raise ValueError("no bucket")
        world.barrier()

    with pytest.raises(ValueError, match="no bucket"):
        call(3, fail)
