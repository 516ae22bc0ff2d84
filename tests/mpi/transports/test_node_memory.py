"""Memory that ranks share: where one rank may not make its file, all have memory of their own."""

from __future__ import annotations

import os

import pytest
import torch

from unisono.call import call_of
from unisono.collectives.group import Group
from unisono.collectives.reduce import broadcast
from unisono.errors import MismatchError, TensorError
from unisono.placement import regular
from unisono.transports import barriers
from unisono.transports.window import Window
from unisono.world import World


def test_a_rank_that_may_make_no_file(group: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise PermissionError("Operation not permitted")

    if group.rank == group.size - 1:
        monkeypatch.setattr(os, "memfd_create", refuse)
    tensor = group.empty(10_000, torch.float32)
    assert group._group.find_shared(tensor.data_ptr(), tensor.nbytes) is None
    assert group.allreduce(tensor + 1).eq(group.size).all()


def test_memory_that_becomes_shared_is_new_to_every_dup(group: World) -> None:
    """A dup's dup, too: it finds that memory, and ranks that still know it as ordinary would differ from the others."""
    dup = group.dup().dup()
    dup.allreduce(torch.ones(1000))
    group.empty(10, torch.float32)
    assert not dup._group.ready


def test_a_refusal_has_words_of_its_own(group: World) -> None:
    if group.size == 1:
        return
    refuses = group.rank == 0
    for length in (3, 4):
        own = torch.ones(1).expand(length) if refuses else torch.ones(length)
        with pytest.raises(TensorError if refuses else MismatchError, match=rf"of shape \({length},\) and strides"):
            group.allreduce(own)


def test_ranks_with_a_core_of_their_own_cut_payloads_as_those_that_share_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barriers, "available_cores", lambda: frozenset({int(world.rank == world.size - 1)}))
    group = Group(world.comm.Dup(), regular(1, 1, world.size), world.table)
    for _ in range(2):
        tensor = torch.full((400_000,), float(world.rank))
        assert broadcast(group, tensor).eq(0).all()
        assert broadcast(group, torch.ones(3)).eq(1).all()
    group.free()


def test_a_rank_whose_world_ends_meanwhile_raises_its_failure(world: World) -> None:
    """Also where it is about to exchange the descriptions of two calls that differ, or waits for the others' ones."""

    def fail() -> None:
        if ended:
            raise ConnectionError("the world has ended")

    ended, comm, call = False, world.comm.Dup(), call_of("a call")
    window = Window(comm, barriers.SIGNALS_BYTES)
    memory = barriers.Signals(comm, range(world.size), fail, window, 0)
    memory.barrier(call)
    comm.Barrier()
    ended = True
    memory.end()
    for operation in (
        lambda: memory.barrier(call),
        lambda: memory._raise_mismatch(call),
    ):
        with pytest.raises(ConnectionError, match="the world has ended"):
            operation()
    memory.free()
    window.free()
    comm.Free()
