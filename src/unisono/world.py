"""The ranks of a run and what they can do together."""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from unisono import uncaught, witness
from unisono.binding import shares_of
from unisono.call import call
from unisono.choosing.table import Table, read_table
from unisono.collectives.all_to_all import all_to_all
from unisono.collectives.allreduce import allreduce
from unisono.collectives.barrier import barrier
from unisono.collectives.broadcast import broadcast
from unisono.collectives.exchange import exchange
from unisono.collectives.group import Group
from unisono.collectives.part_broadcast import part_broadcast
from unisono.collectives.part_reduce import part_reduce
from unisono.collectives.reduce import reduce
from unisono.collectives.watch import Watch
from unisono.errors import LaunchError, TableError, UnisonoError, UsageError
from unisono.launch import own_cores, ranks_started
from unisono.mpi import MPI
from unisono.placement import Placement, place
from unisono.timeouts import TIMEOUT, timeout_of

Result = TypeVar("Result")


class Resource(Protocol):
    """Something that is made once for a world, and closed with it."""

    def close(self) -> None:
        """Wait for what is under way, and end."""


Made = TypeVar("Made", bound=Resource)

_SPLIT, _TWIN, _ON_ROOT = call("split()"), call("twin()"), call("on_root()")
_GATHER, _AGREEING, _FREE = call("gather()"), call("agreeing()"), call("free()")

PATIENCE = 3.0
"""Seconds within which ranks that fail in the same way are taken to do so."""


class World:
    """A group of ranks: who they are, where they sit, and the collectives among them.

    It is passed to whatever needs it. All ranks of the group call its collectives, in the same order.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        table: Table,
        twin: World | None = None,
        watch: Watch | None = None,
        name: str = "world",
        timeout: float = TIMEOUT,
    ) -> None:
        """A world is watched by the `watch` of the one that it is part of, under a name of its own, or has its own.

        Its own ends every wait after `timeout` seconds.
        """
        twin_group = None if twin is None else twin._group
        self._group: Group = Group(comm, placement, table, twin=twin_group, watch=watch, name=name, timeout=timeout)
        self.name = name
        """What messages call it."""
        self.watch = self._group.watch
        """What tells of ranks that do not come, in all worlds that are made of this one's ranks; None for one rank."""
        self._parts = 0  # worlds made of this one
        self._twins: list[World] = []
        self._resources: dict[Callable[[World], Resource], Resource] = {}
        self._freed = False
        self._node_world: World | None = None
        self.placement = placement
        """The ranks of every node, the nodes of every supernode."""
        self.comm = comm
        """The MPI communicator of these ranks, for what is not done here."""
        self.table = table
        """What "auto" chooses by."""
        self.rank: int = comm.rank
        """This rank, 0 to size - 1."""
        self.size: int = comm.size
        """How many ranks there are."""
        self.node = placement.node_of(self.rank)
        """The number of the node this rank sits on."""
        self.nodes = len(placement.nodes)
        """How many nodes there are."""
        self.supernode = placement.supernode_of(self.rank)
        """The number of the supernode (the nodes under one switch) this rank sits in."""

    def allreduce(
        self, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """Reduce `tensor` over all ranks, in place, and return it: any shape, any stride, the same on every rank.

        `algorithm` is "auto" (what was measured, or else priced, chooses), "library", or the name of a schedule. `wire`
        is the form in which messages travel: "float32", "float16" or "bfloat16"; None for the tensor's own. `op` is
        "sum", "product", "minimum", "maximum", or for integers and bool "and", "or", "xor". Sums are made in float32
        or wider. Every rank ends with the same bits.
        Raises TensorError for a dtype, a device or a wire that cannot be carried, UsageError for an unknown algorithm
        or op, MismatchError when ranks are in different calls.
        """
        return allreduce(self._group, tensor, algorithm, wire, op)

    def part_reduce(
        self, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """Reduce `tensor` over all ranks and return this rank's chunk, flat (reduce-scatter; PCL-DNN 3.4).

        Rank r gets elements [n r // p, n (r+1) // p) of the flattened result. `tensor` stays as it is.
        """
        return part_reduce(self._group, tensor, algorithm, wire, op)

    def part_broadcast(
        self, shard: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", wire: str | None = None
    ) -> torch.Tensor:
        """Gather every rank's `shard` into everyone's `out`, and return it (all-gather; PCL-DNN 3.4).

        `shard` has the elements that `part_reduce` of a tensor like `out` would give this rank.
        """
        return part_broadcast(self._group, shard, out, algorithm, wire)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, algorithm: str = "auto") -> torch.Tensor:
        """Give every rank what rank `root` holds in `tensor`, in place, and return it: any dtype, shape and stride."""
        return broadcast(self._group, tensor, root, algorithm)

    def all_to_all(self, tensor: torch.Tensor, algorithm: str = "auto") -> torch.Tensor:
        """Send chunk d of `tensor`, one of p equal parts, to rank d; return what came, chunk s from rank s."""
        return all_to_all(self._group, tensor, algorithm)

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Send sends[d] to rank d, and fill receives[s] with what rank s sends: any sizes on which both ends agree."""
        exchange(self._group, sends, receives)

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: str = "sum") -> None:
        """Reduce `tensor` over all ranks into that of rank `root`, in place; on the others it stays as it is."""
        reduce(self._group, tensor, root, op)

    def barrier(self) -> None:
        """Wait until all ranks have come."""
        barrier(self._group)

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, zeroed tensor in memory where an allreduce copies nothing: shared where all ranks are on one node.

        Called by all ranks with the same arguments. The memory lasts as long as the tensor and what is made of it.
        """
        return self._group.empty(length, dtype)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, node={self.node}, nodes={self.nodes})"

    def split(self, color: int) -> World:
        """The world of the ranks that give the same `color` (0 or more), in the order of their ranks here."""
        with self._group.library_call(_SPLIT):
            comm: MPI.Intracomm = self.comm.Split(color, self.rank)  # type: ignore[assignment]
            sites = comm.allgather((self.node, self.supernode))
            placement = place([node for node, _ in sites], [supernode for _, supernode in sites])
            return World(comm, placement, self.table, watch=self.watch, name=self._next_name(f"split {color}"))

    def twin(self) -> World:
        """A world of the same ranks whose calls meet none of this one's: for a thread of its own.

        It knows the memory that `empty` of this one has given. Made by all ranks together; freed with this one.
        """
        with self._group.library_call(_TWIN):
            twin = World(self.comm.Dup(), self.placement, self.table, self, self.watch, self._next_name("twin"))
        self._twins.append(twin)
        return twin

    def _next_name(self, kind: str) -> str:
        """The name of a world that is made of this one: the same on all its ranks, and no other's."""
        self._parts += 1
        return f"{kind} ({self._parts}) of {self.name}"

    def node_world(self) -> World:
        """The world of the ranks on this rank's node; asked for by all ranks together the first time."""
        if self._node_world is None:
            self._node_world = self if self.nodes == 1 else self.split(self.node)
        return self._node_world

    def on_root(self, function: Callable[[], Result]) -> Result:
        """Call `function` on rank 0 alone; every rank gets what it returns (pickled), or raises what it raised."""
        outcome: tuple[Result | None, UnisonoError | OSError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = function(), None
            except (UnisonoError, OSError) as error:
                outcome = None, error
        with self._group.library_call(_ON_ROOT):
            result, failure = self.comm.bcast(outcome, 0) if self.size > 1 else outcome
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]  # None only where `function` returned it

    def on_all(self, function: Callable[[], Result]) -> Result:
        """Call `function` on every rank, and return what it gives; where it fails on some, all raise the first's error.

        The error is of the same kind and tells the rank; an OSError becomes a UsageError.
        """
        result, failure = None, None
        try:
            result = function()
        except (UnisonoError, OSError) as error:
            failure = type(error) if isinstance(error, UnisonoError) else UsageError, str(error)
        for rank, failed in enumerate(self.gather(failure)):
            if failed is not None:
                kind, words = failed
                raise kind(f"rank {rank}: {words}")
        return result  # type: ignore[return-value]  # None only where `function` returned it

    def gather(self, value: Result) -> list[Result]:
        """What every rank gives, by rank, on every rank (pickled)."""
        with self._group.library_call(_GATHER):
            return self.comm.allgather(value)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Let a UsageError that all ranks raise leave the block on all, told by rank 0 alone.

        When only some ranks raise one, the others may wait for them for ever: then it is told with the rank, and all
        end with exit code 2.
        """
        with self._group.library_call(_AGREEING):
            agreement = self.comm.Dup()
        try:
            yield
        except UsageError as error:
            if self.size == 1:
                agreement.Free()
                raise
            everyone = agreement.Ibarrier()
            give_up = time.monotonic() + PATIENCE
            while not everyone.Test():
                if time.monotonic() > give_up:
                    self.abort(2, f"unisono: rank {self.rank}: {error}\n")
                time.sleep(0.001)
            agreement.Free()
            if self.rank == 0:
                raise
            raise SystemExit(2) from error
        agreement.Free()

    def abort(self, code: int = 1, words: str = "") -> None:
        """End all ranks of the job at once with an exit code that is not 0, after these last words."""
        witness.last_words(words)
        self.comm.Abort(code)

    def resource(self, make: Callable[[World], Made]) -> Made:
        """Return what `make` makes of this world: made once, at the first call, by all ranks together.

        It is closed before the world is freed.
        """
        if make not in self._resources:
            self._resources[make] = make(self)
        return self._resources[make]  # type: ignore[return-value]  # it is what `make` has made

    def label(self, words: str) -> None:
        """Have `words` compared between ranks in each call from here on, as a part of it: "" for none."""
        self._group.label_calls(words)

    def free(self) -> None:
        """Give communicators and memory back, all ranks together; a second time does nothing.

        Not needed at the end of a program. Tensors of `empty` stay valid; no other call of the world is. Worlds that
        were split from this one are then watched no more, unless it has been split from another itself.
        """
        if self._freed:
            return
        if self.size > 1 and not self._group.broken:
            self._group.meet(_FREE)
        for resource in reversed(self._resources.values()):
            resource.close()
        self._resources.clear()
        while self._twins:
            self._twins.pop().free()
        if self._node_world is not None and self._node_world is not self:
            self._node_world.free()
        self._group.free()
        if not self._group.broken:
            self.comm.Free()
        self._freed = True
        self._group = self.comm = _Freed(repr(self))  # type: ignore[assignment]


class _Freed:
    """Stands for what a freed world had: any use raises UsageError."""

    def __init__(self, world: str) -> None:
        self._words = f"{world} has been freed: make another, by unisono.init() or split(), or free it later"

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._words)

    def __call__(self, *_: object, **__: object) -> Any:
        raise UsageError(self._words)


def init(table: Path | None = None, timeout: float | None = None) -> World:
    """The world of all ranks that `mpiexec` or `srun` started; without them, a world of one.

    `table` is a file that says which schedule serves which size, as `unisono tune` writes it (the format is in
    `choosing/default.toml`); else the environment's UNISONO_TABLE names one.
    `timeout` are the seconds after which a rank that waits for others raises StallError; else the environment's
    UNISONO_TIMEOUT says them, else they are 600.
    From here on an uncaught exception in the main thread of any rank prints its traceback with the rank and ends all of
    them (`uncaught.py`), and PyTorch has one thread for each core of the rank's fair share (`binding.py`), unless
    OMP_NUM_THREADS says otherwise.
    Raises LaunchError when the MPI library is not the one that started the ranks, or lacks MPI_THREAD_MULTIPLE, and
    UsageError for a time-out that is no number of seconds above 0.
    """
    world = MPI.COMM_WORLD
    started = ranks_started(os.environ)
    if started is not None and started != world.size:
        raise LaunchError(
            f"{started} ranks were started, but this MPI library sees {world.size}: the launcher and "
            f"{MPI.Get_library_version().splitlines()[0].strip()} do not belong together; use that library's mpiexec"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise LaunchError("MPI was started without MPI_THREAD_MULTIPLE; let unisono.init() start it")
    seconds = timeout_of(timeout)
    if world.size > 1:
        uncaught.install(world.rank, world.size, world.Abort)
    comm = world.Dup()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leader, on_node = node.bcast(comm.rank, 0), node.rank
    shares = shares_of(node.allgather(own_cores()), alone=comm.size == 1)
    _forget_shared_files(node)
    _call_witness(node, comm)  # after it, `startup.py` cleans up no more
    node.Free()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(shares[on_node].threads)
    named = os.environ.get("UNISONO_TABLE")
    choices = _read_by_root(comm, table or (Path(named) if named else None))
    sites = comm.allgather((leader, choices.supernodes.get(socket.gethostname())))
    supernodes = [supernode for _, supernode in sites]
    known = supernodes if None not in supernodes else []
    placement = place([node for node, _ in sites], known)
    return World(comm, placement, choices, timeout=seconds)


def _read_by_root(comm: MPI.Intracomm, path: Path | None) -> Table:
    """The table as rank 0 finds it: all ranks must choose alike."""
    outcome: Table | TableError | None = None
    if comm.rank == 0:
        try:
            outcome = read_table(path)
        except TableError as error:
            outcome = error
    outcome = comm.bcast(outcome, 0)
    if isinstance(outcome, TableError):
        raise outcome
    assert outcome is not None
    return outcome


def _call_witness(node: MPI.Comm, comm: MPI.Comm) -> None:
    """Have somebody look on who says which rank of this node died, when one dies without a word."""
    if comm.size == 1 or witness.called():
        return
    seats = node.gather((comm.rank, os.getpid()), 0)
    address = ""
    if seats:
        ranks, processes = zip(*seats, strict=True)
        address = witness.start(ranks, processes, comm.size)
    witness.know(node.bcast(address, 0))
    atexit.register(witness.tell, comm.rank)


def _forget_shared_files(node: MPI.Comm) -> None:
    """Take the names of MPI's own start-up memory out of /dev/shm: all ranks of the node have mapped it.

    MPICH does so only when it ends in peace, so that every killed or aborted job would leave a file behind.
    """
    maps = Path("/proc/self/maps")
    node.Barrier()
    if node.rank == 0 and maps.exists():
        mapped = {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/mpich_shm_" in line}
        for name in mapped:
            if not name.endswith("(deleted)"):
                Path(name).unlink(missing_ok=True)
    if node.rank == 0:
        _forget_launcher_files()


def _forget_launcher_files() -> None:
    """Take hydra's description of the node's hardware out of /tmp: the ranks have read it when they started.

    Hydra does so at the end, unless it is killed. It is known by its name, its owner and its age: no older than hydra.
    """
    launcher = Path(f"/proc/{os.getppid()}")
    if not launcher.exists() or (launcher / "comm").read_text().strip() != "hydra_pmi_proxy":
        return
    ticks = int((launcher / "stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    born = time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    for path in Path("/tmp").glob("hydra_hwloc_xmlfile_*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            if found.st_uid == os.geteuid() and found.st_mtime >= born - 1:
                path.unlink()
