"""Collectives on the memory of the node's processes: the bits of windows, for every dtype, and errors with names."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from collections.abc import Iterator

import pytest
import torch

from unisono.collectives.all_to_all import all_to_all
from unisono.collectives.allreduce import allreduce
from unisono.collectives.group import Group
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.errors import MismatchError, OperationError
from unisono.network.choice import parse_table
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import dtypes_of
from unisono.transports.cross_memory import CrossMemory, open_cross_memory
from unisono.world import World

SYS_MEMFD_SECRET = 447

LENGTHS = 0, 1, 7, 4099, 300_001
"""The last takes several pieces."""


@pytest.fixture
def cross(world: World) -> Iterator[World]:
    """All ranks, whose collectives go through the memory of the processes."""
    rows = {name: [{"where": "one node", "algorithm": "direct", "transport": "cma"}] for name in DIRECT}
    rows["broadcast"] = [{"where": "one node", "algorithm": "tree", "transport": "cma"}]
    cross = World(world.comm.Dup(), world.placement, parse_table(rows, "test"))
    yield cross
    cross.free()


DIRECT = ("allreduce", "reduce_scatter", "all_gather", "all_to_all")


def contribution(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of a rank, whose sums round."""
    numbers = torch.randn(length, generator=torch.Generator().manual_seed(length * 31 + rank)) * 100
    return (numbers.abs() % 50 if not dtype.is_signed else numbers).to(dtype)


def require(world: World) -> CrossMemory:
    """Return access to the other ranks' memory; skip where the kernel forbids it."""
    from unisono.call import call_of

    if world.size == 1:
        pytest.skip("a rank alone has no other's memory")
    memory = world._group.cross_memory(call_of("test"))
    if memory is None:
        pytest.skip("the kernel forbids process_vm_readv")
    return memory


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_have_the_bits_of_windows(world: World, cross: World, length: int) -> None:
    require(cross)
    for op in ("sum", "maximum"):
        for dtype in dtypes_of(op):
            mine = contribution(world.rank, length, dtype)
            right = world.allreduce(mine.clone(), "direct", op=op)
            for _ in range(2):
                tensor = mine.clone()
                cross.allreduce(tensor, op=op)
                assert torch.equal(tensor.view(torch.uint8), right.view(torch.uint8)), dtype
            shard = cross.reduce_scatter(mine, op=op)
            own = slice(*bounds(length, world.size, world.rank))
            assert torch.equal(shard.view(torch.uint8), right[own].view(torch.uint8)), dtype
            assert torch.equal(mine, contribution(world.rank, length, dtype))


@pytest.mark.parametrize("length", LENGTHS)
def test_moves(cross: World, length: int) -> None:
    require(cross)
    rows = [contribution(rank, length * cross.size, torch.float64) for rank in range(cross.size)]
    mine, each = rows[cross.rank], slice(cross.rank * length, (cross.rank + 1) * length)
    gathered = cross.all_gather(mine[each].clone(), torch.zeros_like(mine))
    assert torch.equal(gathered, torch.cat([row[r * length : (r + 1) * length] for r, row in enumerate(rows)]))
    exchanged = all_to_all(cross._group, mine)
    assert torch.equal(exchanged, torch.cat([row[each] for row in rows]))
    for root in range(cross.size):
        tensor = mine.clone()
        cross.broadcast(tensor, root)
        assert torch.equal(tensor, rows[root])


def test_a_tensor_in_shared_memory_and_a_strided_one(cross: World) -> None:
    require(cross)
    window = cross.empty(100_003, torch.float32).fill_(cross.rank + 1)
    strided = torch.full((50_001, 2), cross.rank + 1.0)[:, 0]
    total = cross.size * (cross.size + 1) / 2
    for tensor in (window, strided):
        cross.allreduce(tensor)
        assert tensor.eq(total).all()


def test_different_calls_are_named(cross: World) -> None:
    require(cross)
    tensor = torch.ones(70_000 + (cross.rank == 1))
    with pytest.raises(MismatchError, match=r"70000 x float32.*70001 x float32|70001 x float32.*70000 x float32"):
        cross.allreduce(tensor)
    assert cross.allreduce(torch.ones(70_000)).eq(cross.size).all()


def test_the_variable_of_one_rank_forbids_it_on_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    require(world)
    memory = world._group._memory
    assert memory is not None
    if world.rank == world.size - 1:
        monkeypatch.setenv("UNISONO_CMA", "off")
    assert open_cross_memory(world.comm, memory.signals) is None


def test_a_process_that_has_ended_is_named(world: World, cross: World) -> None:
    signals = require(cross).signals
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    gone = CrossMemory(signals, [child] * world.size)
    into = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(OperationError, match=rf"rank {world.rank} cannot access .* process {child}: No such process"):
        gone.read(0, into.data_ptr(), into.data_ptr(), 16)


def test_first_calls_that_differ_are_named(world: World, cross: World) -> None:
    require(world)
    tensor = torch.ones(2000 * cross.size)
    with pytest.raises(MismatchError, match=r"all_to_all.*broadcast|broadcast.*all_to_all"):
        cross.broadcast(tensor) if cross.rank == 0 else cross.all_to_all(tensor)
    assert cross.allreduce(torch.ones(70_000)).eq(cross.size).all()


def secret_memory(nbytes: int) -> mmap.mmap:
    """Return memory that the kernel copies for no process, as that of many drivers; skip where there is none."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(SYS_MEMFD_SECRET, 0)
    if descriptor < 0:
        pytest.skip(f"no secret memory: {os.strerror(ctypes.get_errno())}")
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def test_memory_that_the_kernel_does_not_copy_goes_through_windows(world: World, cross: World) -> None:
    require(world)
    length, last = 1000 * world.size, world.size - 1
    numbers = torch.frombuffer(secret_memory(4 * length), dtype=torch.float32)
    numbers = numbers if world.rank == last else torch.empty(length)
    expected = torch.arange(length) * world.size
    for _ in range(2):  # the second is prepared
        numbers.copy_(torch.arange(length))
        cross.allreduce(numbers)
        assert numbers.equal(expected.float())
    begin, end = bounds(length, world.size, world.rank)
    assert cross.reduce_scatter(numbers).equal(expected[begin:end].float() * world.size)
    assert cross.broadcast(numbers.fill_(world.rank + 1), 0).eq(1).all()  # MPICH itself sends none of such memory
    received = cross.all_to_all(numbers.fill_(world.rank))
    assert received.view(world.size, 1000).eq(torch.arange(world.size)[:, None]).all()
    cross.all_gather(torch.full((1000,), float(world.rank)), numbers)
    assert numbers.view(world.size, 1000).eq(torch.arange(world.size)[:, None]).all()


@pytest.mark.parametrize("refused", ["try_read", "try_write"])
def test_what_the_kernel_refuses_one_rank_no_rank_does(
    world: World, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    signals = require(world).signals
    if world.rank == world.size - 1:
        monkeypatch.setattr(CrossMemory, refused, lambda *_: False)
    assert open_cross_memory(world.comm, signals) is None


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter"])
def test_the_memory_of_an_ended_call_is_not_given_to_others(world: World, cross: World, collective: str) -> None:
    """A rank that comes late would read and write there."""
    require(cross)
    group = Group(world.comm.Dup(), world.placement, cross.table)
    allreduce(group, torch.ones(100_000))
    if world.rank == 0:
        tensor = torch.ones(100_000)
        group.calls.fail(OperationError, "the end")
        kept = weakref.ref(tensor.untyped_storage())
        with pytest.raises(OperationError, match="the end"):
            allreduce(group, tensor) if collective == "allreduce" else reduce_scatter(group, tensor)
        del tensor
        gc.collect()
        assert kept() is not None
    world.barrier()
    group.abandon()
