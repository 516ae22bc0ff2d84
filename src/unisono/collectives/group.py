"""What the collectives of one group of ranks share: communicators, shared memory, and the plans made so far.

A group that spans nodes has two more within it, made at first use:

    node 0   rank 0  rank 1          node     the ranks of the same node: {0, 1}, {2, 3}
    node 1   rank 2  rank 3          column   the ranks in the same place of their nodes: {0, 2}, {1, 3}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch

from unisono.choosing.pace import pace_of, piece_of
from unisono.choosing.table import Table
from unisono.collectives.payload import memory_of, name_of
from unisono.collectives.plans import Plan, Plans
from unisono.collectives.watch import WORDS, Watch, difference
from unisono.errors import MismatchError
from unisono.mpi import MPI
from unisono.placement import Placement, apart, place
from unisono.schedules.hierarchical import columns
from unisono.schedules.pieces import cut
from unisono.schedules.schedule import Algorithm
from unisono.transports.delivery import Delivery, Parcel
from unisono.transports.messages import MessageChannel, wait
from unisono.transports.node_memory import NodeMemory
from unisono.transports.player import play
from unisono.transports.windows import Call, call


class Group:
    """A group of ranks. Every method that moves data is called by all of them, in the same order."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        table: Table,
        watch: Watch | None = None,
        ranks: Sequence[int] | None = None,
        interrupted: Callable[[], None] | None = None,
        twin: Group | None = None,
    ) -> None:
        """`ranks` are what the user knows these as; `watch` is that of the group which this one is part of.

        `twin` is a group of the same ranks whose windows are known here too.

        `interrupted` is called now and then in every wait, in whatever thread waits. It may raise to end the wait; then
        all that is left to do with the group is to `abandon` it.
        """
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.ranks = ranks or range(comm.size)
        self.placement, self.table, self.one_node = placement, table, placement.one_node
        self._outer_watch, self.interrupted, self._twin = watch, interrupted, twin
        self.watch = watch or (None if self.one_node else Watch(comm, self._node_ranks))
        self.broken = False
        """Whether a wait was ended, or ranks of several nodes differed: no collective call is to be made any more."""
        self._messages = comm.Dup()  # so that a schedule's messages meet no others
        self._talk = comm.Dup()
        for channel in (comm, self._messages, self._talk):
            channel.Set_errhandler(MPI.ERRORS_RETURN)  # exceptions here, whatever was set
        self._memory: NodeMemory | None = None
        self._plans = Plans(self.rank, placement, table)
        self.plan, self.program = self._plans.plan, self._plans.program
        self.find, self.broadcast_from = self._plans.find, self._plans.broadcast_from
        self._inner: list[Group] = []
        self._levels: tuple[Group, Group | None] | None = None

    @property
    def node_memory(self) -> NodeMemory:
        """What the ranks of the one node share, made at first use, by all ranks together."""
        if self._memory is None:
            self._come_together()
            self._memory = NodeMemory(self.comm, self.ranks, self.check, one_of_several=self.watch is not None)
        return self._memory

    def find_window(self, address: int, nbytes: int) -> tuple[str, list[Any]] | None:
        """The bytes from `address` if they lie in a window: where, in words, and as each rank holds them; else None."""
        found = None if self._memory is None else self._memory.find(address, nbytes)
        if (
            found is None
            and self._twin is not None
            and (in_twin := self._twin.find_window(address, nbytes)) is not None
        ):
            return f"the twin's {in_twin[0]}", in_twin[1]
        return found

    @cached_property
    def columns(self) -> int:
        """How many ranks every node has at least."""
        return columns(self.placement)

    def levels(self, what: Call) -> tuple[Group, Group | None]:
        """The groups of this rank's node and, where all nodes have it, of its column; made in the first call `what`."""
        if self._levels is None:
            self._come_together()
            with self.call(what, in_library=True):
                node = self._split(self.placement.node_of(self.rank), place([0] * len(self._node_ranks)))
                self._levels = node, self._column()
                if node.size > 1:
                    _ = node.node_memory
        return self._levels

    def _column(self) -> Group | None:
        column = self._node_ranks.index(self.rank)
        nodes = len(self.placement.nodes)
        supernodes = self.placement.supernodes or [0] * nodes
        inside = column < self.columns
        group = self._split(column if inside else self.columns, place(range(nodes), supernodes) if inside else apart(1))
        return group if inside else None

    @property
    def _node_ranks(self) -> tuple[int, ...]:
        return self.placement.nodes[self.placement.node_of(self.rank)]

    def _split(self, color: int, placement: Placement) -> Group:
        comm: MPI.Intracomm = self.comm.Split(color, self.rank)  # type: ignore[assignment]
        ranks = comm.allgather(self.ranks[self.rank])
        group = Group(comm, placement, self.table, self.watch, ranks, self.check if self.interrupted else None)
        self._inner.append(group)
        return group

    def _come_together(self) -> None:
        """Wait until all have come, before the library makes what all make together: that wait cannot be ended."""
        self.finish(self._talk.Ibarrier())

    def check(self) -> None:
        """Raise what ends a wait: ranks were found to differ, or `interrupted` raises. Called now and then in each."""
        try:
            if self.watch is not None:
                self.watch.check()
            if self.interrupted is not None:
                self.interrupted()
        except BaseException:
            self.broken = True
            raise

    def keep(self, *pending: object) -> None:
        """Keep what messages are still under way to, with a communicator, as nobody waits for them any more."""
        self._messages.Set_attr(MPI.Comm.Create_keyval(), pending)

    @contextmanager
    def call(self, what: Call, in_library: bool = False) -> Iterator[int]:
        """A collective call: on one node all ranks are made sure to be in it, across nodes it is watched over.

        Gives a number that ranks in the same call have in common. An error that ranks differ is told to all of them.
        """
        if self.watch is None:
            self.node_memory.signals.meet(what)
            yield 0
            return
        try:
            with self.watch.over(what.words, in_library) as number:
                yield number
        except MismatchError as error:
            self.broken = True
            self.watch.tell_all(str(error))
            raise

    @contextmanager
    def library_call(self, what: Call) -> Iterator[None]:
        """A call that the MPI library carries out, once all ranks are known to be in it."""
        with self.call(what):
            self.agree(what)
            with self.call(what, in_library=True) if self.watch is not None else nullcontext():
                yield

    def agree(self, what: Call) -> None:
        """Across nodes, make sure that all ranks are in the same call before the MPI library carries it out.

        On one node `call` has done so. Costs one exchange of 16 bytes. Raises MismatchError on every rank.
        """
        if self.watch is None:
            return
        mine = np.array([what.number, -what.number], np.int64)
        most = np.empty_like(mine)
        self.finish(self.comm.Iallreduce(mine, most, MPI.MAX), mine, most)
        if (most != mine).any():
            self.disagree(what)

    def disagree(self, what: Call) -> None:
        """Raise MismatchError, when all ranks know that they differ."""
        mine = np.frombuffer(what.words.encode()[:WORDS].ljust(WORDS), np.uint8)
        said = np.empty((self.size, WORDS), np.uint8)
        self.finish(self._talk.Iallgather(mine, said), mine, said)  # what did not match may still be under way
        calls = [row.tobytes().decode(errors="replace").strip() for row in said]
        other, words = next((rank, words) for rank, words in enumerate(calls) if words != calls[self.rank])
        raise MismatchError(difference(self.ranks[self.rank], calls[self.rank], self.ranks[other], words))

    def finish(self, request: MPI.Request, *buffers: object) -> None:
        """Wait for what the library has begun on these buffers."""
        try:
            wait(request, self.check)
        except BaseException:
            self.keep(request, *buffers)
            raise

    def play(
        self, algorithm: Algorithm, tensor: torch.Tensor, number: int, plan: Plan, chunk_major: bool = False
    ) -> None:
        """Play a schedule over messages on a contiguous tensor, in place. `number` is what `call` gave."""
        program, wire, length = self.program(algorithm), plan.wire, tensor.numel()
        in_flight = None if wire is None else wire.flight.itemsize
        pace = pace_of(program, self.size, length, tensor.dtype.itemsize, self.table.network, in_flight)
        channel = MessageChannel(self._messages, memory_of(tensor), plan.arithmetic, wire, number, self.check, pace.nap)
        try:
            play(program, cut(length, program.chunks, pace.largest, chunk_major), channel, pace.at_once)
        except BaseException:
            self.keep(channel, tensor)
            raise

    def deliver(self, sends: Iterable[Parcel], receives: Iterable[Parcel], number: int) -> None:
        """Send and receive parcels of any sizes as messages. `number` is what `call` gave."""
        delivery = Delivery(self._messages, self.ranks, number, piece_of(self.table.network), self.check)
        try:
            delivery.carry(sends, receives)
        except BaseException:
            self.keep(delivery)
            raise

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, zeroed tensor in a window where all ranks share a node, in the rank's own memory elsewhere."""
        if not self.one_node or self.size == 1:
            return torch.zeros(length, dtype=dtype)
        self.node_memory.signals.meet(call(f"empty({length} x {name_of(dtype)})"))
        return self.node_memory.empty(length, dtype)

    def free(self) -> None:
        """Give communicators and shared memory back, all ranks together; nothing where the group is broken."""
        if self.broken:
            self.abandon()
            return
        for group in self._inner:
            group.free()
            group.comm.Free()
        self._inner.clear()
        self._levels = None
        if self._memory is not None:
            self._memory.free()
            self._memory = None
        self._plans.forget()
        if self.watch is not None and self._outer_watch is None:
            self.watch.free()
        self._messages.Free()
        self._talk.Free()

    def abandon(self) -> None:
        """Leave for good, without the other ranks: memory and communicators stay, but nothing runs here any more."""
        self.broken = True
        for group in self._inner:
            group.abandon()
        if self.watch is not None and self._outer_watch is None:
            self.watch.stop()
