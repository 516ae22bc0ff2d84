"""Which transport sums a device's tensors take, and sums by PyTorch's own backend within nodes.

The device pretends, and so does the backend, whose sums run late on a stream of its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.collectives import device_transports
from unisono.collectives.allreduce import allreduce
from unisono.collectives.device_transports import VARIABLE, NodeBackend, Transports, transports_of
from unisono.collectives.direct import mpi_reports_support
from unisono.collectives.group import Group
from unisono.errors import MismatchError, StallError, UnisonoError, UsageError
from unisono.placement import place
from unisono.world import World

NAME = "pretend_sums"

ORDERS = int(os.environ.get("ORDERS", "20"))
"""Seeds of orders in which nothing may go wrong, of each of 3 sums."""


@pytest.fixture
def backend(pretend: Callable[[int], torch.device], monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device with a backend in PyTorch's table, which sums tensors of any length once it is chosen."""
    device = pretend(1)
    importlib.import_module("unisono.testing.pretend_backend").use_pretend_backend()
    monkeypatch.setattr(device_transports, "PROBE_BYTES", 1 << 10)
    monkeypatch.setattr(device_transports, "MIN_DIRECT_BYTES", 0)
    yield device
    del dist.Backend.default_device_backend_map["pretend"]


@pytest.fixture
def asked(backend: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device whose backend is asked for."""
    monkeypatch.setenv(VARIABLE, NAME)
    return backend


def on_nodes(world: World, nodes: int) -> World:
    """All ranks, by turns on so many nodes: a world that has tried nothing yet."""
    return World(world.comm.Dup(), place([rank % nodes for rank in range(world.size)]), world.table)


each_schedule = pytest.mark.parametrize("algorithm", ["auto", "leader"])


@pytest.fixture(params=[1, 2])
def these(request: pytest.FixtureRequest, world: World) -> Iterator[World]:
    """All ranks on one node, and on two where each has as many of several."""
    if world.size == 1 or (request.param == 2 and world.size != 4):
        pytest.skip("the nodes do not have as many ranks each, or one has one")
    group = on_nodes(world, request.param)
    yield group
    group.free()


def spied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that are summed by the backend from here on."""
    lengths, reduce = list[int](), NodeBackend._reduce
    monkeypatch.setattr(NodeBackend, "_reduce", lambda *of: (lengths.append(len(of[1])), reduce(*of))[1])
    return lengths


@each_schedule
def test_sums_by_the_backend_are_those_of_the_host(
    these: World, asked: torch.device, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Of tensors that the device computes while the call begins, and that are read at once; also in parts of none."""
    lengths = spied(monkeypatch)
    dtypes = {"sum": torch.float64, "product": torch.float32, "minimum": torch.bfloat16, "maximum": torch.int64}
    for op, dtype in dtypes.items():
        for length in (1, 1001):
            here = (torch.arange(length) % 3 + these.rank % 2).to(dtype)
            there = here.to(asked).mul(2)
            summed = these.allreduce(there, algorithm, op=op).clone()
            torch.testing.assert_close(summed.cpu(), these.allreduce(here.mul(2), op=op), rtol=0, atol=0)
    assert lengths[-8:] == [1, 1001] * 4


@each_schedule
def test_no_order_of_streams_is_wrong(these: World, asked: torch.device, algorithm: str) -> None:
    reseed = importlib.import_module("unisono.testing.pretend").reseed
    right = [these.allreduce(torch.arange(10.0).add(step + these.rank).double()) for step in range(3)]
    for seed in range(ORDERS):
        reseed(seed)
        for step in range(3):
            there = torch.arange(10.0).double().to(asked).add(step).add_(these.rank)
            assert torch.equal(these.allreduce(there, algorithm).mul(3).cpu(), right[step] * 3), f"{seed}, {step}"


@each_schedule
@pytest.mark.parametrize("removed", ["the wait for the backend", "the backend's for the program"])
def test_a_missing_synchronization_gives_wrong_sums(
    these: World, asked: torch.device, monkeypatch: pytest.MonkeyPatch, removed: str, algorithm: str
) -> None:
    these.allreduce(torch.ones(4, device=asked))
    importlib.import_module("unisono.testing.pretend").reseed(None)  # what nobody waits for does not run
    if removed == "the wait for the backend":
        monkeypatch.setattr(NodeBackend, "_wait", lambda *_: None)
    else:
        stream = importlib.import_module("unisono.testing.pretend_device").Stream
        monkeypatch.setattr(stream, "wait_stream", lambda *_: None)
    summed = these.allreduce(torch.ones(4, device=asked).mul(2), algorithm).cpu()
    assert summed.tolist() != [2.0 * these.size] * 4
    torch.get_device_module(asked).synchronize()
    these.barrier()


def test_what_the_backend_does_not_know_goes_another_way(
    these: World, asked: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = spied(monkeypatch)
    these.allreduce(torch.ones(2, dtype=torch.int16, device=asked))
    these.allreduce(torch.ones(2, dtype=torch.int64, device=asked), op="or")
    these.allreduce(torch.ones(2, device=asked), "ring")
    del lengths[:]
    for name in ("hierarchical", "leader"):
        assert these.allreduce(torch.ones(2, device=asked), name).tolist() == [these.size] * 2
    assert lengths == [2, 2]


def test_one_rank_of_a_node_is_its_leader(these: World, asked: torch.device) -> None:
    """Which alone sums with other nodes."""
    these.allreduce(torch.ones(4, device=asked), "leader")
    backend, lengths = these._group.backends["pretend"], list[int]()
    between = backend._allreduce
    backend._allreduce = lambda *of: (lengths.append(len(of[1])), between(*of))[1]
    these.allreduce(torch.ones(4, device=asked), "leader")
    assert lengths == ([4] if these.nodes == 2 and these.rank < 2 else [])


@each_schedule
def test_a_wire_that_there_is_not_is_refused_on_all_ranks(these: World, asked: torch.device, algorithm: str) -> None:
    with pytest.raises(UnisonoError, match="wire"):
        these.allreduce(torch.ones(4, device=asked), algorithm, wire="float7")
    assert these.allreduce(torch.ones(2, device=asked), algorithm).tolist() == [these.size] * 2


@each_schedule
def test_between_nodes_a_wire_is_used_and_within_them_none(these: World, asked: torch.device, algorithm: str) -> None:
    these.allreduce(torch.ones(2, device=asked))
    third = torch.full((64,), 1 / 3, device=asked)
    sums = [these.size // 2 / 3, these.size / 3] if these.nodes == 2 else [these.size / 3]
    rounded = torch.tensor(sums[0]).bfloat16().float().mul(these.nodes).bfloat16().float() if these.nodes == 2 else None
    summed = these.allreduce(third, algorithm, wire="bfloat16").cpu()
    right = torch.full((64,), these.size / 3) if rounded is None else rounded.expand(64)
    torch.testing.assert_close(summed, right)


@pytest.mark.parametrize("fastest", ["staged", NAME])
def test_the_fastest_is_taken_by_all_ranks(
    these: World, backend: torch.device, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    def seconds(*of: Any) -> float:
        by = NAME if "NodeBackend" in repr(of[2]) else "staged"
        device_seconds(*of)
        return 1.0 if by == fastest else 2.0

    device_seconds = device_transports._seconds
    monkeypatch.setattr(device_transports, "_seconds", seconds)
    transports = these.device_transports(backend)
    assert transports == Transports(moves=False, backend=NAME if fastest == NAME else "")
    assert transports.stays == (fastest == NAME)
    said = f"sums {NAME} within nodes, staged between" if fastest == NAME else "sums staged"
    assert str(transports) == said
    assert bool(these._group.backends) == (fastest == NAME), "what is not used is given back"


def test_ranks_that_share_a_device_do_not_try(
    these: World, backend: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transports, "identity_of", str)
    transports = these.device_transports(backend)
    shares = "ranks 0 and 2 share a device" if these.nodes == 2 else "ranks 0 and 1 share a device"
    assert str(transports) == f"sums staged ({NAME} is not tried: {shares})"
    these._group.transports_of_devices.clear()
    monkeypatch.setenv(VARIABLE, NAME)
    with pytest.raises(UsageError, match=f"{VARIABLE}={NAME}: {shares}; unset the variable"):
        these.device_transports(backend)


def test_nodes_with_other_numbers_of_ranks_do_not_try(world: World, backend: torch.device) -> None:
    if world.size in (1, 4):
        pytest.skip("each node has as many")
    group = on_nodes(world, 2)
    assert "a node has one rank, or another number" in str(group.device_transports(backend))
    group.free()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_backend_that_one_rank_cannot_open_is_not_taken(
    these: World, backend: torch.device, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Ranks learn of it before any of them waits in the backend."""
    create = dist.Backend._plugins[NAME.upper()]

    def refusing(*arguments: Any) -> Any:
        if these.rank == failing:
            raise RuntimeError("no room for a communicator\nand more")
        return create.creator_fn(*arguments)

    monkeypatch.setitem(dist.Backend._plugins, NAME.upper(), create._replace(creator_fn=refusing))
    transports = these.device_transports(backend)
    assert str(transports) == f"sums staged ({NAME} is not tried: rank {failing}: no room for a communicator)"


def test_mismatched_calls_are_reported(these: World, asked: torch.device) -> None:
    these.allreduce(torch.ones(4, device=asked))
    with pytest.raises(MismatchError, match=f"allreduce.*of a device, by {NAME}"):
        these.allreduce(torch.ones(5 + (these.rank == 1), device=asked))


def test_mismatched_schedules_are_reported(these: World, asked: torch.device) -> None:
    these.allreduce(torch.ones(4, device=asked))
    with pytest.raises(MismatchError, match=f"leader.*of a device, by {NAME}"):
        these.allreduce(torch.ones(4, device=asked), "leader" if these.rank == 1 else "auto")


@pytest.mark.usefixtures("differing")
def test_mismatched_first_calls_are_reported(world: World, asked: torch.device) -> None:
    """Before the transports are tried."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    group = Group(world.comm, world.placement, world.table)
    with pytest.raises(MismatchError, match="first allreduce of a tensor on pretend"):
        allreduce(group, torch.ones(4, device=asked if world.rank == 1 else "cpu"))
    group.abandon()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_wait_for_a_rank_that_is_not_in_the_backend_ends(
    world: World, asked: torch.device, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """As where it is dead: after the time-out of the job, and the rest of the program knows that the group is gone.

    On two nodes it is a leader, for which the other leader and both other ranks wait."""
    if world.size == 1 or (nodes == 2 and world.size != 4):
        pytest.skip("needs two ranks on each node")
    group = Group(world.comm, place([rank % nodes for rank in range(world.size)]), world.table, timeout=3.0)
    allreduce(group, torch.ones(4, device=asked), "leader")
    if world.rank == 1:
        monkeypatch.setattr(NodeBackend, "_reduce", lambda *_: None)
        allreduce(group, torch.ones(4, device=asked), "leader")
    else:
        with pytest.raises(StallError):
            allreduce(group, torch.ones(4, device=asked), "leader")
        assert group.broken
    world.barrier()
    group.abandon()


def test_dups_have_backends_of_their_own(these: World, asked: torch.device) -> None:
    """Two threads may sum at once; the transports are tried once."""
    these.allreduce(torch.ones(4, device=asked))
    dup = these.dup()
    assert dup.allreduce(torch.ones(4, device=asked)).tolist() == [these.size] * 4
    assert dup._group.backends["pretend"] is not these._group.backends["pretend"]
    assert dup._group.transports_of_devices is these._group.transports_of_devices


def test_no_device_is_tried_that_the_library_does_not_move(world: World) -> None:
    def staged(*_: Any) -> torch.Tensor:
        raise AssertionError("nothing is timed")

    group = Group(world.comm, world.placement, world.table)
    if not mpi_reports_support("cuda") and not torch.cuda.is_available():
        assert transports_of(group, torch.device("cuda"), staged) == Transports(moves=False)
    assert transports_of(group, torch.device("xpu"), staged) == Transports(moves=False)
    group.free()


def test_a_transport_that_is_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> torch.Tensor:
        pytest.fail("nothing is timed")

    group, device = Group(world.comm, world.placement, world.table), torch.device("meta")
    monkeypatch.setenv(VARIABLE, "staged")
    assert transports_of(group, device, never) == Transports(moves=False)
    group.transports_of_devices.clear()
    monkeypatch.setenv(VARIABLE, "direct")
    with pytest.raises(UsageError, match=r"direct: .* does not move memory of meta rightly here; take a library"):
        transports_of(group, device, never)
    monkeypatch.setenv(VARIABLE, "nccl")
    with pytest.raises(UsageError, match='is "nccl"; set it to "staged" or "direct", or unset it'):
        transports_of(group, device, never)
    group.free()
