"""Three transports of sums of a device's tensors, of which the first use tries those that are there.

    staged    copies in the host's memory, where any transport sums them (`staged.py`)
    direct    MPI moves the device's memory (`direct.py`)
    nccl      PyTorch's own backend for the device within each node, one of the other two between nodes; NCCL for CUDA,
              XCCL for XPU: its name is that in PyTorch's table of backends

`docs/devices.md` has their paths. The host waits for the backend by asking again and again, so that a wait for a rank
that is dead ends. NCCL waits for ever for ranks whose nodes have other numbers of them, so it is no candidate there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from unisono.call import call_of
from unisono.collectives.checks import Checks
from unisono.collectives.direct import MIN_DIRECT_BYTES, allreduce_direct, mpi_reports_support
from unisono.collectives.group import Group
from unisono.collectives.payload import flat_of, name_of, put_back
from unisono.collectives.prepare import AUTO
from unisono.collectives.staged import Allreduce, allreduce_staged
from unisono.device import identity_of, module_of
from unisono.errors import BackendError, UsageError
from unisono.launch import TIMEOUT
from unisono.mpi import MPI, allreduce_min
from unisono.schedules.hierarchical import nodes_of
from unisono.transports.arithmetic import HALF_DTYPES
from unisono.transports.messages import SLEEP_AFTER_SECONDS_IN_LIBRARY, wait_until
from unisono.wires import wire_of

VARIABLE = "UNISONO_DEVICE_TRANSPORT"
"""Environment variable of rank 0: "staged", "direct" or the name of a backend; else what is tried and fastest."""

STAGED, DIRECT = "staged", "direct"

PROBE_BYTES = 8 << 20
"""Bytes of the sum by which transports are tried."""

HIERARCHICAL, LEADER = "hierarchical", "leader"
"""Schedules whose rounds within nodes a backend carries out; no other that is asked for by name."""

OPS = {"sum": "SUM", "product": "PRODUCT", "minimum": "MIN", "maximum": "MAX"}
"""PyTorch's names of the ops that backends of devices know."""

DTYPES = {*HALF_DTYPES, torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8}
"""Dtypes that they know."""


class Transports(NamedTuple):
    """Transports of the sums of one kind of device."""

    moves: bool
    """True where MPI moves the memory of the device, faster than by copies in the host's."""
    backend: str = ""
    """Name of PyTorch's backend, where sums by it within nodes are fastest."""
    why_not: str = ""
    """Reason for which a backend that is there was not tried."""

    @property
    def stays(self) -> bool:
        """True where sums do not pass through the host's memory, at least within a node."""
        return self.moves or bool(self.backend)

    def takes(self, tensor: torch.Tensor, op: str, algorithm: str) -> bool:
        """Return True for an allreduce that goes through the backend."""
        known = op in OPS and tensor.dtype in DTYPES and algorithm in (AUTO, HIERARCHICAL, LEADER)
        return known and bool(self.backend) and tensor.nbytes >= MIN_DIRECT_BYTES

    def __str__(self) -> str:
        """Return the transports in words, as the start of a run says them."""
        between = DIRECT if self.moves else STAGED
        ways = f"{self.backend} within nodes, {between} between" if self.backend else between
        return f"sums {ways}{f' ({self.why_not})' if self.why_not else ''}"


ALONE = Transports(moves=True)
"""Transports of one rank, whose sums need none."""


def transports_of(group: Group, device: torch.device, allreduce: Allreduce) -> Transports:
    """Return how sums of a kind of device travel. Called by all ranks together.

    The first call for a kind of device tries what is there, unless rank 0's environment asks for one. Raises UsageError
    on all ranks for one that is not there.
    """
    if device.type not in group.transports_of_devices:
        group.transports_of_devices[device.type] = _try(group, device, allreduce)
    return group.transports_of_devices[device.type]  # type: ignore[no-any-return]


def _try(group: Group, device: torch.device, allreduce: Allreduce) -> Transports:
    kind = device.type
    with group.enter_library_call(call_of(f"first allreduce of a tensor on {kind}")):
        asked = group.comm.bcast(os.environ.get(VARIABLE, ""))
        name, why_not = _backend_for(group, device)
    known = [STAGED, DIRECT, *([name] if name else [])]
    if asked not in ("", *known):
        allowed = " or ".join(f'"{transport}"' for transport in known)
        raise UsageError(f'{VARIABLE} is "{asked}"; set it to {allowed}, or unset it')
    acts = {STAGED: partial(allreduce_staged, allreduce, group, algorithm=AUTO, wire=None, op="sum")}
    if asked != STAGED:
        able, act = mpi_reports_support(kind), partial(allreduce_direct, group, op="sum")
        if bool(allreduce_min(group.comm, able)) and _sums_rightly(group, device, act):
            acts[DIRECT] = act
    if asked == DIRECT and DIRECT not in acts:
        library = MPI.Get_library_version().splitlines()[0].split(",")[0]
        raise UsageError(
            f"{VARIABLE}={DIRECT}: {library} does not move memory of {kind} rightly here; take a library that is built "
            "for it, or unset the variable"
        )
    if asked in (STAGED, DIRECT) or (len(acts) == 1 and not name):
        return Transports(asked == DIRECT)
    seconds = {way: _seconds(group, device, act) for way, act in acts.items()} if len(acts) > 1 or not why_not else {}
    moves = min(seconds, key=seconds.__getitem__, default=STAGED) == DIRECT
    if name and not why_not:
        group.transports_of_devices[kind] = Transports(moves)  # between the nodes
        try:
            backend = backend_of(group, device, allreduce, name)
            seconds[name] = _seconds(group, device, partial(backend.allreduce, op="sum", wire=None))
        except BackendError as error:
            why_not = str(error)
    if asked == name and why_not:
        raise UsageError(f"{VARIABLE}={name}: {why_not}; unset the variable")
    if why_not:
        return Transports(moves, why_not=f"{name} is not tried: {why_not}")
    if name and (asked == name or min(seconds, key=seconds.__getitem__) == name):
        return Transports(moves, name)
    if name:
        group.backends.pop(kind).free()
    return Transports(moves)


def _sums_rightly(group: Group, device: torch.device, act: Callable[[torch.Tensor], object]) -> bool:
    ones = torch.ones(PROBE_BYTES // 4, device=device)
    act(ones)
    return bool(allreduce_min(group.comm, bool((ones == group.size).all())))


def _seconds(group: Group, device: torch.device, act: Callable[[torch.Tensor], object]) -> float:
    """Return the seconds of a second sum on the slowest rank."""
    module, took, ones = module_of(device), 0.0, torch.ones(PROBE_BYTES // 4, device=device)
    for _ in range(2):
        module.synchronize(device)
        group.comm.Barrier()
        began = time.perf_counter()
        act(ones)
        module.synchronize(device)
        took = time.perf_counter() - began
    slowest = np.array([took])
    group.comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return float(slowest[0])


def _backend_for(group: Group, device: torch.device) -> tuple[str, str]:
    """Return the name of PyTorch's backend for a kind of device, empty where there is none; and why it cannot be tried,
    empty where it can. Both are the same on all ranks."""
    name = _backend_name(device)
    devices = group.comm.allgather((name, identity_of(device) if name else ""))
    if not name or len({name for name, _ in devices}) > 1:
        return "", ""
    nodes = group.placement.nodes
    if len(nodes[0]) == 1 or len(set(map(len, nodes))) > 1:
        return name, "a node has one rank, or another number of ranks than the others"
    for node in nodes:
        users: dict[str, int] = {}
        for rank in node:
            if (first := users.setdefault(devices[rank][1], rank)) != rank:
                return name, f"ranks {first} and {rank} share a device"
    return name, ""


def _backend_name(device: torch.device) -> str:
    """Return the name that PyTorch's table has for a device; empty also for a PyTorch below 2.14, which makes a backend
    only for a program's default group."""
    register = getattr(dist.Backend, "_ensure_backend_registered", None) if dist.is_available() else None
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    if register is None or not name or not (module_of(device).is_available() and dist.is_backend_available(name)):
        return ""
    register(name)
    return name


def backend_of(group: Group, device: torch.device, allreduce: Allreduce, name: str = "") -> NodeBackend:
    """Return the backend of the ranks of this node, which all ranks of the group make together once; by default the one
    that was chosen. Raises BackendError on all ranks if it cannot be made."""
    if device.type not in group.backends:
        name = name or group.transports_of_devices[device.type].backend
        group.backends[device.type] = NodeBackend(group, device, name, allreduce)
    return group.backends[device.type]  # type: ignore[no-any-return]


class NodeBackend:
    """Backend of PyTorch's for a kind of device, among the ranks of a node of a group."""

    def __init__(self, group: Group, device: torch.device, name: str, allreduce: Allreduce) -> None:
        """Make the backend and sum by it, all ranks together. Raises BackendError on all ranks if one cannot."""
        self.name, self._group, self._allreduce = name, group, allreduce
        self._seat, nodes = group.node_ranks.index(group.rank), group.placement.nodes
        self._backend: Any = None
        with group.enter_library_call(call_of(f"first sum by {name}")):
            node: Any = group.comm.Split(group.placement.node_of(group.rank), group.rank)
            for act in (self._open, self._sum_ones):  # the backends of ranks connect at the first sum
                self._agree(partial(act, node, device))
            node.Free()
        self._column: Group | None = None
        if len(nodes) > 1:
            with group.enter_library_call(call_of(f"columns of {name}")):
                comm: Any = group.comm.Split(self._seat, group.rank)
                called = f"column {self._seat} of {group.calls.name}, for {name}"
                ranks, among = [node[self._seat] for node in nodes], nodes_of(group.placement)
                self._column = Group(comm, among, group.table, ranks, watch=group.watch, name=called)
            transports = group.transports_of_devices[device.type]
            self._column.transports_of_devices[device.type] = transports._replace(backend="")

    def _agree(self, act: Callable[[], str]) -> None:
        """Call a function that returns why it has failed. Raise BackendError on all ranks if one has."""
        try:
            failure = act()
        except (RuntimeError, ValueError) as error:  # of PyTorch, whatever the backend raises
            failure = str(error).strip().splitlines()[0]
        for rank, reason in enumerate(self._group.comm.allgather(failure)):
            if reason:
                self.abort()
                raise BackendError(f"rank {rank}: {reason}")

    def _open(self, node: MPI.Intracomm, device: torch.device) -> str:
        seconds = TIMEOUT if self._group.watch is None else self._group.watch.timeout
        timeout = timedelta(seconds=2 * seconds)  # ours ends waits first
        if (store := store_in_memory(node, timeout)) is None:
            return "ranks of a node cannot open one file in memory"
        plugin = dist.Backend._plugins[self.name.upper()]
        if not plugin.extended_api:
            self._backend = plugin.creator_fn(store, node.rank, node.size, timeout)
            return ""
        asked: Any = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
        asked.store, asked.group_rank, asked.group_size, asked.timeout = store, node.rank, node.size, timeout
        asked.group_id, asked.global_ranks_in_group = f"{self._group.calls.name}, on {device.type}", [*range(node.size)]
        self._backend = plugin.creator_fn(asked, None)
        return ""

    def _sum_ones(self, node: MPI.Intracomm, device: torch.device) -> str:
        tensor = torch.ones(1, device=device)
        self._wait(self._backend.allreduce([tensor], _options(dist.AllreduceOptions(), "sum")))
        return "" if float(tensor) == node.size else f"a sum of {node.size} ones is {float(tensor)}"

    def allreduce(self, tensor: torch.Tensor, op: str, wire: str | None, algorithm: str = AUTO) -> None:
        """Reduce `tensor` over all ranks by `op`, in place, with `wire` between the nodes."""
        group, flat, by_leaders = self._group, flat_of(tensor), algorithm == LEADER
        with Checks(group, "allreduce"):
            wire_of(wire, flat.dtype)  # raises for an unknown one, also where nothing is sent between nodes
        options = [f"{len(flat)} x {name_of(flat.dtype)}", op, LEADER * by_leaders, wire and f"wire {wire}"]
        call = call_of(f"allreduce({', '.join(filter(None, options))}), of a device, by {self.name}")
        with group.enter_call(call):
            group.check_same_call(call)
            with group.calls.enter(call.description):  # the watch observes it on one node, too
                try:
                    self._reduce(flat, op, wire, by_leaders)
                except BaseException:  # whatever it is, the backend may still use the memory
                    group.broken = True
                    group.keep_alive(flat)
                    self.abort()
                    raise
        put_back(tensor, flat)

    def _reduce(self, flat: torch.Tensor, op: str, wire: str | None, by_leaders: bool) -> None:
        wide = flat.float() if flat.dtype in HALF_DTYPES else flat
        if self._column is None:
            self._wait(self._backend.allreduce([wide], _options(dist.AllreduceOptions(), op)))
        elif by_leaders:  # rank 0 of each node
            self._wait(self._backend.reduce([wide], _options(dist.ReduceOptions(), op)))
            if self._seat == 0:
                self._allreduce(self._column, wide, AUTO, wire, op)
            self._wait(self._backend.broadcast([wide], dist.BroadcastOptions()))
        else:
            ranks = len(self._group.node_ranks)
            spare = -len(wide) % ranks
            padded = torch.nn.functional.pad(wide, (0, spare)) if spare else wide
            part = padded.view(ranks, -1)[self._seat]
            scattered = _options(dist.ReduceScatterOptions(), op)
            self._wait(self._backend.reduce_scatter_single(part, padded, scattered))
            self._allreduce(self._column, part, AUTO, wire, op)
            self._wait(self._backend.all_gather_single(padded, part))
            if spare:
                wide.copy_(padded[: len(wide)])
        if wide is not flat:
            flat.copy_(wide)

    def _wait(self, work: Any) -> None:
        """Wait for the backend, and let the calling thread's stream wait for it."""
        wait_until(work.is_completed, self._group.check, sleep_after_seconds=SLEEP_AFTER_SECONDS_IN_LIBRARY)
        work.wait()

    def abort(self) -> None:
        """End what the backend does, without the other ranks."""
        if self._backend is not None:
            self._backend.abort()

    def free(self) -> None:
        """End the backend; called by all ranks together."""
        self._backend.shutdown()
        if self._column is not None:
            self._column.free()
            self._column.comm.Free()


def _options(options: Any, op: str) -> Any:
    options.reduceOp = getattr(dist.ReduceOp, OPS[op])
    return options


def store_in_memory(comm: MPI.Intracomm, timeout: timedelta) -> Any:
    """Return PyTorch's store of the ranks of a node, in an unnamed file that rank 0 creates in memory; None if a rank
    cannot open it. Called by all ranks of `comm` together.

    Every rank has the file open itself, so the system removes it with the last process, however that ends.
    """
    made = os.memfd_create("unisono-store") if comm.rank == 0 and hasattr(os, "memfd_create") else -1
    seat = (os.getpid(), made, _file_of(made)) if made >= 0 else None
    process, descriptor, identity = comm.bcast(seat, 0) or (0, -1, None)
    opened = made
    if opened < 0:
        with suppress(OSError):  # ranks in containers of their own do not see each other's processes
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    if allreduce_min(comm, opened >= 0 and _file_of(opened) == identity):
        store = dist.FileStore(f"/proc/self/fd/{opened}", comm.size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store
    if opened >= 0:
        os.close(opened)
    return None


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
