"""Memory that the MPI library moves as it is: that of the host, and that of a device that pretends, by true addresses.

The library knows no streams, so a missing synchronization shows."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.mpi.collectives.distinct import RANKS, distinct

from unisono.collectives import allreduce as allreduce_module
from unisono.collectives import direct
from unisono.collectives.device_transports import Transports
from unisono.collectives.direct import (
    all_gather_direct,
    allreduce_direct,
    broadcast_direct,
    mpi_reports_support,
    reduce_scatter_direct,
)
from unisono.collectives.group import Group
from unisono.collectives.payload import memory_of
from unisono.errors import MismatchError, TensorError
from unisono.placement import place, regular
from unisono.world import World

ONE_NODE, ACROSS = distinct(regular(1, 1, RANKS)), distinct(place([rank % 2 for rank in range(RANKS)]))
"""The schedules that differ there; `test_schedules.py` plays every name."""


@pytest.fixture
def group(world: World) -> Iterator[Group]:
    group = Group(world.comm, world.placement, world.table)
    yield group
    group.free()


@pytest.fixture
def moved(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device whose memory the library moves."""
    if device.type != "pretend":
        pytest.skip("the library of this machine may not move its memory")
    from unisono.testing import pretend

    monkeypatch.setattr(direct, "memory_of", lambda tensor: memory_of(pretend._host(tensor)))
    return device


@pytest.mark.parametrize(
    ("where", "name"), [*(("world", name) for name in ONE_NODE), *(("spread", name) for name in ACROSS)]
)
def test_any_schedule_has_the_sums_of_the_host(
    request: pytest.FixtureRequest, moved: torch.device, where: str, name: str
) -> None:
    """In several pieces and with empty chunks, of a tensor that the device computes while the call begins."""
    these: World = request.getfixturevalue(where)
    group = Group(these.comm, these.placement, these.table)
    for length, dtype in ((1, torch.float64), (4001, torch.float64), (777, torch.bfloat16)):
        here = (torch.arange(length) % 11 + these.rank).to(dtype)
        there = here.to(moved).mul(2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "PIECE_BYTES", 1 << 11)
            allreduce_direct(group, there, "sum", None, name)
        there.div_(2)
        torch.testing.assert_close(there.cpu(), these.allreduce(here, name), rtol=1e-12, atol=1e-12)
    group.free()


def test_other_collectives_of_a_device(world: World, group: Group, moved: torch.device) -> None:
    size, place = world.size, slice(3 * world.rank, 3 * world.rank + 3)
    tensor, part = own(world, 3 * size, torch.float64), torch.empty(3, dtype=torch.float64, device=moved)
    there = tensor.to(moved) * 2
    reduce_scatter_direct(group, there, part, "maximum")
    torch.testing.assert_close(part.cpu(), 2 * of_rank(size - 1, 3 * size, torch.float64)[place])
    torch.testing.assert_close(there.cpu(), 2 * tensor)
    all_gather_direct(group, part * 3, there)
    torch.testing.assert_close(there.cpu(), 6 * of_rank(size - 1, 3 * size, torch.float64))
    for root in range(size):
        there = tensor.to(moved) * 2
        broadcast_direct(group, there, root)
        torch.testing.assert_close(there.cpu(), 2 * of_rank(root, 3 * size, torch.float64))


def test_a_world_takes_the_named_schedule(world: World, moved: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own sum is one of the host's memory."""
    if world.size == 1:
        pytest.skip("nothing is summed")
    played: list[str] = []
    play = direct._play
    monkeypatch.setattr(direct, "_play", lambda *of: (played.append(of[4]), play(*of))[1])
    monkeypatch.setattr(direct, "MIN_DIRECT_BYTES", 0)
    moves = Transports(moves=True)
    monkeypatch.setattr(
        allreduce_module, "transports_of", lambda group, *_: group.transports_of_devices.setdefault("pretend", moves)
    )
    group = world.split(0)
    for name in ("auto", "ring", "halving", "library"):
        tensor = torch.ones(100, device=moved)
        assert group.allreduce(tensor, name).cpu().tolist() == [world.size] * 100
    assert played == ["direct", "ring", "halving"]
    group.free()


def test_a_missing_synchronization_gives_wrong_sums(
    world: World, group: Group, moved: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.size == 1:
        pytest.skip("nothing is sent")
    reseed = importlib.import_module("unisono.testing.pretend").reseed
    reseed(None)  # what nobody waits for does not run
    monkeypatch.setattr(direct, "_settle", lambda _: None)
    tensor = torch.ones(100, device=moved).mul(2)
    allreduce_direct(group, tensor, "sum")
    assert tensor.cpu().tolist() != [2 * world.size] * 100


def own(world: World, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(length).to(dtype) + world.rank + 1


def of_rank(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(length).to(dtype) + rank + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_allreduce(world: World, group: Group, dtype: torch.dtype) -> None:
    for op, combine in {"sum": torch.sum, "product": torch.prod}.items():
        tensor = own(world, 5, dtype)
        allreduce_direct(group, tensor, op)
        every = torch.stack([of_rank(rank, 5, dtype) for rank in range(world.size)])
        torch.testing.assert_close(tensor, combine(every, 0, dtype=dtype))


def test_reduce_scatter(world: World, group: Group) -> None:
    tensor, part = own(world, 3 * world.size, torch.float32), torch.empty(3)
    reduce_scatter_direct(group, tensor, part, "sum")
    total = sum(of_rank(rank, 3 * world.size, torch.float32) for rank in range(world.size))
    torch.testing.assert_close(part, total.view(world.size, 3)[world.rank])


def test_broadcast(world: World, group: Group) -> None:
    for root in range(world.size):
        tensor = own(world, 7, torch.bfloat16)
        broadcast_direct(group, tensor, root)
        torch.testing.assert_close(tensor, of_rank(root, 7, torch.bfloat16))


def test_all_gather(world: World, group: Group) -> None:
    out = torch.empty(4 * world.size, dtype=torch.float16)
    all_gather_direct(group, own(world, 4, torch.float16), out)
    torch.testing.assert_close(out, torch.cat([of_rank(rank, 4, torch.float16) for rank in range(world.size)]))


def test_parts_of_another_dtype_or_length_are_refused(world: World, group: Group) -> None:
    full = torch.empty(4 * world.size)
    for part in (torch.empty(4, dtype=torch.bfloat16), torch.empty(5)):
        with pytest.raises(TensorError, match=rf"rank \d: {len(part)} x .* is not one of {world.size} equal parts of"):
            all_gather_direct(group, part, full)
        with pytest.raises(TensorError, match="equal parts of"):
            reduce_scatter_direct(group, full, part, "sum")


def test_sixteen_bits_round_the_parts_and_their_sum(world: World, group: Group) -> None:
    tensor = own(world, 1001, torch.float32)
    allreduce_direct(group, tensor, "sum", "bfloat16")
    parts = [of_rank(rank, 1001, torch.float32).bfloat16().float() for rank in range(world.size)]
    torch.testing.assert_close(tensor, sum(parts).bfloat16().float(), rtol=0, atol=0)


def test_half_precision_is_summed_in_float32(world: World, group: Group) -> None:
    tensor = own(world, 77, torch.float16) / 7
    parts = [(of_rank(rank, 77, torch.float16) / 7).float() for rank in range(world.size)]
    allreduce_direct(group, tensor, "sum")
    torch.testing.assert_close(tensor, sum(parts).half(), rtol=0, atol=0)


def test_mismatched_calls_are_reported(world: World, group: Group) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(MismatchError):
        allreduce_direct(group, own(world, 5 + (world.rank == 1), torch.float32), "sum")


def test_a_library_without_gpus_does_not_claim_them() -> None:
    assert not mpi_reports_support("pretend")
    if not torch.cuda.is_available():
        assert not mpi_reports_support("cuda"), "a library that was built for GPUs, on a machine without"


@pytest.mark.parametrize("answer", [0, 1])
def test_a_library_answers_for_a_kind_of_device(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert mpi_reports_support("cuda") is (answer == 1)
    assert not mpi_reports_support("xpu")
