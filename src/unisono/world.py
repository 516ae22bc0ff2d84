"""Ranks of a run, and the operations that they carry out together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Integral
from typing import Any, Protocol, TypeVar

import torch

from unisono import witness
from unisono.call import call_of
from unisono.collectives.all_gather import all_gather
from unisono.collectives.all_to_all import all_to_all, all_to_all_v
from unisono.collectives.allreduce import allreduce, device_transports
from unisono.collectives.checks import Checks
from unisono.collectives.device_transports import ALONE, Transports
from unisono.collectives.group import Group
from unisono.collectives.reduce import broadcast, reduce
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.collectives.watch import Watch
from unisono.errors import UnisonoError, UsageError
from unisono.launch import TIMEOUT
from unisono.mpi import MPI
from unisono.network.choice import ScheduleTable
from unisono.placement import Partition, Placement, place
from unisono.transports.sockets import Sockets

Result = TypeVar("Result")


class Resource(Protocol):
    """Resource that is created once for a world, and closed with it."""

    def close(self) -> None:
        """Wait for the work under way, and end."""


Made = TypeVar("Made", bound=Resource)

QUANTIZED = ("torch.qint", "torch.quint")
"""Beginnings of the names of dtypes whose tensors have scales, too."""

ERROR_AGREEMENT_SECONDS = 3.0
"""Seconds within which all ranks must fail for their failures to count as one."""


class World:
    """Group of ranks: their numbers, their placement, and the collectives among them.

    `unisono.init()` returns the world of all ranks. All ranks of a world call its collectives in the same order.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        table: ScheduleTable,
        dup: World | None = None,
        watch: Watch | None = None,
        name: str = "world",
        timeout: float = TIMEOUT,
    ) -> None:
        """Create a world with the `watch` of the world that it is part of, under its own `name`, or with its own watch.

        A watch of its own ends every wait after `timeout` seconds.
        """
        dup_group = None if dup is None else dup._group
        self._group: Group = Group(comm, placement, table, dup=dup_group, watch=watch, name=name, timeout=timeout)
        self.name = name
        """Name of the world in messages."""
        self.watch = self._group.watch
        """Watch that reports missing ranks, in all worlds that are made of this one's ranks; None for one rank."""
        self._parts = 0  # worlds made of this one
        self._dups: list[World] = []
        self._resources: dict[Callable[[World], Resource], Resource] = {}
        self._freed = False
        self._groups: dict[Partition, World] = {}
        self.placement = placement
        """Ranks of every node, and the supernode of every node."""
        self.comm = comm
        """MPI communicator of these ranks, for operations that are not provided here."""
        self.table = table
        """Table by which "auto" chooses."""
        self.rank: int = comm.rank
        """Number of this rank, 0 to size - 1."""
        self.size: int = comm.size
        """Number of ranks."""
        self.node = placement.node_of(self.rank)
        """Number of the node of this rank."""
        self.nodes = len(placement.nodes)
        """Number of nodes."""
        self.supernode = placement.supernode_of(self.rank)
        """Number of the supernode (the nodes under one switch) of this rank."""

    def allreduce(
        self, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
    ) -> torch.Tensor:
        """Reduce `tensor` over all ranks, in place, and return it: any shape, any stride, the same on every rank.

        `algorithm` is "auto" (chosen by measurements, or else by predicted cost), "library", or the name of a schedule.
        `wire` is the number format of the messages: "float32", "float16", "bfloat16", "int8" or "int4"; None for the
        tensor's own; "exact" for a sum whose bits depend on no algorithm and no order of ranks. `op` is "sum",
        "product", "minimum", "maximum", or for integers and bool "and", "or", "xor". Sums are computed in float32 or
        wider. Every rank ends with the same bits.
        Raises TensorError for a dtype, a device or a wire that is not supported, UsageError for an unknown algorithm or
        op, MismatchError when ranks make different calls.
        """
        return allreduce(self._group, tensor, algorithm, wire, op)

    def device_transports(self, device: torch.device) -> Transports:
        """Return how sums of a kind of device travel. The first call, by all ranks together, tries what is there."""
        return device_transports(self._group, device) if self.size > 1 else ALONE

    def reads_other_processes(self) -> bool:
        """Return True if the ranks, all of one node, may read each other's memory (Linux: process_vm_readv)."""
        return self.size > 1 and self._group.reads_other_processes()

    def sockets(self) -> Sockets | None:
        """Return the sockets by which collectives go between nodes; None on all ranks, which call it together, where
        they do not."""
        calls = self._group.socket_calls(call_of("sockets()")) if self.nodes > 1 else None
        return None if calls is None else calls.sockets

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        algorithm: str = "auto",
        wire: str | None = None,
        op: str = "sum",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reduce `tensor` over all ranks and return this rank's chunk, flat: `out`, or a new tensor.

        Rank r gets elements [n r // p, n (r+1) // p) of the flattened result. `tensor` is not changed, unless `out` is
        that part of it. `algorithm`, `wire`, `op` and errors are those of `allreduce`; TensorError for an `out` that
        does not fit.
        """
        return reduce_scatter(self._group, tensor, algorithm, wire, op, out)

    def all_gather(
        self, shard: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", wire: str | None = None
    ) -> torch.Tensor:
        """Gather every rank's `shard` into `out` on every rank, and return `out`.

        `shard` has the elements that `reduce_scatter` of a tensor like `out` would give this rank. Any dtype: nothing
        is reduced. Raises TensorError for a shard that does not fit `out`.
        """
        return all_gather(self._group, shard, out, algorithm, wire)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, algorithm: str = "auto") -> torch.Tensor:
        """Copy rank `root`'s `tensor` to every rank, in place, and return it: any dtype, shape and stride."""
        return broadcast(self._group, tensor, root, algorithm)

    def all_to_all(
        self, tensor: torch.Tensor, algorithm: str = "auto", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Send chunk d of `tensor`, one of p equal parts, to rank d; return the received chunks, chunk s from rank s,
        in `out` or a new tensor.

        Any dtype and stride. Raises TensorError if p does not divide the number of elements, or `out` does not fit or
        shares memory with `tensor`.
        """
        return all_to_all(self._group, tensor, algorithm, out)

    def all_to_all_v(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        """Send sends[d] to rank d, and receive rank s's tensor in receives[s]: any sizes, equal on both ends.

        All tensors have one dtype. Raises TensorError for other arguments, MismatchError if both ends disagree.
        """
        all_to_all_v(self._group, sends, receives)

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: str = "sum") -> None:
        """Reduce `tensor` over all ranks into rank `root`'s, in place; on the other ranks it is not changed."""
        reduce(self._group, tensor, root, op)

    def barrier(self) -> None:
        """Wait until all ranks have reached the barrier."""
        self._group.barrier()

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, zeroed tensor that an allreduce need not copy: in shared memory if all ranks are on one node.

        Called by all ranks with the same arguments. The memory lasts as long as the tensor and its views. Raises
        UsageError for what is no number of elements and no plain dtype, and leaves the world usable.
        """
        with Checks(self._group, "empty"):
            is_count = isinstance(length, Integral) and not isinstance(length, bool) and length >= 0
            if not is_count or not isinstance(dtype, torch.dtype) or str(dtype).startswith(QUANTIZED):
                raise UsageError(
                    f"rank {self.rank}: empty({length!r}, {dtype!r}) is no number of elements and a plain torch.dtype; "
                    "the tensor is flat: give it a shape by .view"
                )
            nbytes, memory = int(length) * dtype.itemsize, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if nbytes > memory:
                request = f"empty({length}, {dtype}) needs {nbytes:,} bytes"
                raise UsageError(f"rank {self.rank}: {request}, and this machine has {memory:,}")
        return self._group.empty(int(length), dtype)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, node={self.node}, nodes={self.nodes})"

    def split(self, color: int, key: int | None = None) -> World:
        """Return the world of the ranks that give the same `color`, ordered by `key`, or else by rank.

        Raises UsageError for a color that is not a number from 0 to 2**31 - 1, or a key that is no such number, from
        -2**31 on, and leaves the world usable.
        """
        with Checks(self._group, "split"):
            if key is not None and not (isinstance(key, Integral) and -(1 << 31) <= key < 1 << 31):
                raise UsageError(f"rank {self.rank}: split({color!r}, {key!r}); a key is a number of 32 bits, or None")
            if not isinstance(color, Integral) or not 0 <= color < 1 << 31:
                raise UsageError(f"rank {self.rank}: split({color!r}); a color is a number from 0 to {(1 << 31) - 1}")
        with self._group.enter_library_call(call_of("split()")):
            comm: MPI.Intracomm = self.comm.Split(color, self.rank if key is None else key)
            sites = comm.allgather((self.node, self.supernode))
            placement = place([node for node, _ in sites], [supernode for _, supernode in sites])
            return World(comm, placement, self.table, watch=self.watch, name=self._next_name(f"split {color}"))

    def dup(self) -> World:
        """Return a world of the same ranks whose calls are separate from this one's, for another thread.

        It can use the memory that `empty` of this world has returned. Created by all ranks together; freed with this
        world.
        """
        with self._group.enter_library_call(call_of("dup()")):
            dup = World(self.comm.Dup(), self.placement, self.table, self, self.watch, self._next_name("dup"))
        self._dups = [*(dup_world for dup_world in self._dups if not dup_world._freed), dup]
        return dup

    def _next_name(self, kind: str) -> str:
        """Return the name of a world that is made of this one: the same on all its ranks, and no other's."""
        self._parts += 1
        return f"{kind} ({self._parts}) of {self.name}"

    def group_world(self, partition: Partition) -> World:
        """Return the world of this rank's group in a partition, with its ranks in the group's order. The first call is
        made by all ranks together; it is freed with this world."""
        if partition not in self._groups:
            color = next(index for index, ranks in enumerate(partition) if self.rank in ranks)
            self._groups[partition] = self.split(color, partition[color].index(self.rank))
        return self._groups[partition]

    def node_world(self) -> World:
        """Return the world of the ranks on this rank's node; the first call is made by all ranks together."""
        return self if self.nodes == 1 else self.group_world(self.placement.nodes)

    def call_on_root(self, function: Callable[[], Result], root: int = 0) -> Result:
        """Call `function` on rank `root` alone; every rank returns its result (pickled), or raises its error.

        The errors are UnisonoError and OSError.
        """
        outcome: tuple[Result | None, UnisonoError | OSError | None] = (None, None)
        if self.rank == root:
            try:
                outcome = function(), None
            except (UnisonoError, OSError) as error:
                outcome = None, error
        with self._group.enter_library_call(call_of("call_on_root()")):
            result, failure = self.comm.bcast(outcome, root) if self.size > 1 else outcome
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]  # None only where `function` returned it

    def call_on_all(self, function: Callable[[], Result]) -> Result:
        """Call `function` on every rank and return its result; if it fails on some, all raise the first one's error.

        The error is of the same class and names the rank; an OSError becomes a UsageError.
        """
        result, failure = None, None
        try:
            result = function()
        except (UnisonoError, OSError) as error:
            failure = type(error) if isinstance(error, UnisonoError) else UsageError, str(error)
        for rank, failed in enumerate(self.all_gather_object(failure)):
            if failed is not None:
                kind, message = failed
                raise kind(f"rank {rank}: {message}")
        return result  # type: ignore[return-value]  # None only where `function` returned it

    def all_gather_object(self, value: Result) -> list[Result]:
        """Return the values of all ranks, by rank, on every rank (pickled)."""
        with self._group.enter_library_call(call_of("all_gather_object()")):
            return self.comm.allgather(value)

    def gather_object(self, value: Result) -> list[Result]:
        """Return the values of all ranks, by rank, on rank 0, and an empty list on others (pickled)."""
        with self._group.enter_library_call(call_of("gather_object()")):
            return self.comm.gather(value) or []

    @contextmanager
    def agree_on_errors(self) -> Iterator[None]:
        """Return a context for code that raises UsageError on all ranks: rank 0 alone reports it.

        If only some ranks raise one, the others might wait for them forever. Then the error is printed with its rank,
        and all ranks end with exit code 2.
        """
        with self._group.enter_library_call(call_of("agree_on_errors()")):
            agreement = self.comm.Dup()
        try:
            yield
        except UsageError as error:
            if self.size == 1:
                agreement.Free()
                raise
            everyone = agreement.Ibarrier()
            give_up = time.monotonic() + ERROR_AGREEMENT_SECONDS
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
        """End all ranks of the job at once with an exit code other than 0, after printing `words`."""
        witness.report_abort(words)
        self.comm.Abort(code)

    def resource(self, make: Callable[[World], Made]) -> Made:
        """Return the resource that `make` creates for this world: once, at the first call, by all ranks together.

        It is closed before the world is freed.
        """
        if make not in self._resources:
            self._resources[make] = make(self)
        return self._resources[make]  # type: ignore[return-value]  # it is what `make` has made

    def labelled(self, words: str) -> AbstractContextManager[None]:
        """Add `words` to each call of the block, as a part that ranks compare; "" adds none."""
        return self._group.labelled(words)

    def free(self) -> None:
        """Free communicators and memory, all ranks together; a second call does nothing.

        Not needed at the end of a program. Tensors of `empty` stay valid; all other calls of the world raise
        UsageError. Worlds that were split from this one are no longer watched, unless it was split from another itself.
        """
        if self._freed:
            return
        if self.size > 1 and not self._group.broken:
            self._group.barrier(call_of("free()"))
        for resource in reversed(self._resources.values()):
            resource.close()
        self._resources.clear()
        while self._dups:
            self._dups.pop().free()
        while self._groups:
            self._groups.popitem()[1].free()
        self._group.free()
        if not self._group.broken:
            self.comm.Free()
        self._freed = True
        self._group = self.comm = _Freed(repr(self))  # type: ignore[assignment]


class _Freed:
    """Placeholder for the attributes of a freed world: any use raises UsageError."""

    def __init__(self, world: str) -> None:
        self._message = f"{world} has been freed: make another, by unisono.init() or split(), or free it later"

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._message)

    def __call__(self, *_: object, **__: object) -> Any:
        raise UsageError(self._message)
