"""Collectives that are carried out again on the same memory, beside the expected result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from unisono.collectives.all_gather import all_gather
from unisono.collectives.all_to_all import all_to_all
from unisono.collectives.allreduce import allreduce
from unisono.collectives.group import Group
from unisono.collectives.ready import MAX_READY
from unisono.collectives.reduce import broadcast, reduce
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.placement import one_rank_per_node, regular
from unisono.schedules.pieces import bounds
from unisono.world import World


@pytest.fixture(params=["one node", "apart"])
def these(request: pytest.FixtureRequest, world: World) -> Iterator[Group]:
    placement = regular(1, 1, world.size) if request.param == "one node" else one_rank_per_node(world.size)
    group = Group(world.comm.Dup(), placement, world.table)
    yield group
    group.free()


def values(rank: int, turn: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32).remainder(50) + rank + 10 * turn


@pytest.mark.parametrize("length", [1, 5, 700, 5000, 70_001])
def test_each_call_sees_what_the_memory_holds_then(these: Group, length: int) -> None:
    ranks, own = range(these.size), slice(*bounds(length, these.size, these.rank))
    tensor, gathered, chunk = torch.empty(length), torch.empty(length), torch.empty(own.stop - own.start)
    for turn in range(4):
        rows = [values(rank, turn, length) for rank in ranks]
        total = torch.stack(rows).sum(dim=0)
        root = turn % 2 % these.size
        tensor.copy_(rows[these.rank])
        reduce(these, tensor, root)
        assert torch.equal(tensor, total if these.rank == root else rows[these.rank])
        tensor.copy_(rows[these.rank])
        assert torch.equal(reduce_scatter(these, tensor), total[own])
        assert reduce_scatter(these, tensor, out=chunk) is chunk
        assert torch.equal(chunk, total[own])
        assert torch.equal(tensor, rows[these.rank])
        assert torch.equal(all_gather(these, chunk, gathered), total)
        assert torch.equal(broadcast(these, tensor, root), rows[root])


@pytest.mark.parametrize("each", [1, 5, 700, 9000])
def test_all_to_all_again(these: Group, each: int) -> None:
    sent, out = torch.empty(these.size * each), torch.empty(these.size * each)
    for turn in range(3):
        sent.copy_(values(these.rank, turn, len(sent)))
        expected = torch.cat([values(rank, turn, len(sent)).view(these.size, -1)[these.rank] for rank in these.ranks])
        assert torch.equal(all_to_all(these, sent), expected)
        assert torch.equal(all_to_all(these, sent, out=out), expected)


def test_another_view_of_the_same_memory_is_another_tensor(these: Group) -> None:
    square = torch.zeros(6, 6)
    for view in (square, square.T, torch._neg_view(square), square.view(torch.int32), square.flatten()):  # type: ignore[attr-defined]
        broadcast(these, view.fill_(0))
        view.copy_(torch.arange(36).view(view.shape) + these.rank)
        expected = torch.arange(36).view(view.shape).to(view.dtype)
        assert torch.equal(broadcast(these, view), expected)


@pytest.mark.parametrize(("length", "op"), [(1, "sum"), (19, "sum"), (700, "maximum")])
def test_new_short_tensors_are_reduced_as_the_first_one_was(these: Group, length: int, op: str) -> None:
    held = [values(these.rank, turn, length) for turn in range(6)]
    shared = these.empty(length, torch.float32).copy_(values(these.rank, 6, length))
    for turn, tensor in enumerate([*held, shared]):
        rows = [values(rank, turn, length) for rank in these.ranks]
        expected = torch.stack(rows).sum(dim=0) if op == "sum" else rows[-1]
        assert torch.equal(allreduce(these, tensor, op=op), expected)
    if these.one_node:
        assert len(these.ready) == min(1, these.size - 1), "one play, and a function of addresses"


def test_few_are_kept(these: Group) -> None:
    memory = torch.zeros(MAX_READY + 10)
    for place in range(len(memory)):
        broadcast(these, memory[place : place + 1])
    assert len(these.ready) <= MAX_READY


@pytest.mark.parametrize(("dtype", "op"), [(torch.float16, "maximum"), (torch.float32, "maximum")])
def test_what_inference_mode_has_prepared_is_carried_out_after_it(these: Group, dtype: torch.dtype, op: str) -> None:
    tensor = torch.empty(1000, dtype=dtype)
    for inference in (True, False):
        with torch.inference_mode(inference):
            allreduce(these, tensor.fill_(1), op=op)
        assert tensor.eq(these.size if op == "sum" else 1).all()
