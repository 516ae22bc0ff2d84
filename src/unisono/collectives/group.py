"""What the collectives of one group of ranks share: communicators, shared memory, and the plans made so far.

A group that spans nodes has two more within it, made at first use:

    node 0   rank 0  rank 1          node     the ranks of the same node: {0, 1}, {2, 3}
    node 1   rank 2  rank 3          column   the ranks in the same place of their nodes: {0, 2}, {1, 3}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from unisono.choosing.priced import Choice
from unisono.choosing.table import SHARED, Table
from unisono.collectives.payload import memory_of, name_of
from unisono.collectives.watch import Watch, difference
from unisono.errors import MismatchError, UsageError
from unisono.mpi import MPI
from unisono.placement import Placement, apart, place
from unisono.schedules import find
from unisono.schedules.hierarchical import columns
from unisono.schedules.numbering import renumber
from unisono.schedules.pieces import cut
from unisono.schedules.schedule import Algorithm, Family, Program
from unisono.transports.arithmetic import Arithmetic, arithmetic_of
from unisono.transports.messages import MessageChannel, wait
from unisono.transports.node_memory import NodeMemory
from unisono.transports.player import play
from unisono.transports.sweep import can_sweep
from unisono.transports.windows import Call, call
from unisono.transports.wires import Wire, wire_of

IN_FLIGHT = 8
"""Pieces of a payload that go through a schedule at once."""

LANDING = 32 << 20
"""Bytes that may land at a rank at once, to be summed: all the memory that an exchange takes."""

PLANS = 4096
"""Plans that are kept."""


class Plan(NamedTuple):
    """What carries out a collective for one dtype and size."""

    choice: Choice
    arithmetic: Arithmetic
    wire: Wire | None
    what: Call
    sweeps: bool
    """Whether each rank touches only its own chunk of everybody's, so that shared memory needs two meetings only."""


class Group:
    """A group of ranks. Every method that moves data is called by all of them, in the same order."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        table: Table,
        watch: Watch | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """`ranks` are what the user knows these ranks as; `watch` is that of the group which this one is part of."""
        self.rank, self.size, self.comm = comm.rank, comm.size, comm
        self.ranks = ranks or range(comm.size)
        self.placement, self.table = placement, table
        self.one_node = placement.one_node
        self._outer_watch = watch
        self.watch = watch or (None if self.one_node else Watch(comm, self._node_ranks))
        self._messages = comm.Dup()  # so that a schedule's messages meet no others
        self._talk = comm.Dup()
        for channel in (comm, self._messages, self._talk):
            channel.Set_errhandler(MPI.ERRORS_RETURN)  # exceptions here, whatever was set
        self._memory: NodeMemory | None = None
        self._plans: dict[tuple[str, str, str | None, torch.dtype, int], Plan] = {}
        self._programs: dict[Algorithm, Program] = {}
        self._families: dict[str, Family] = {}
        self._rotated: dict[tuple[str, int], Algorithm] = {}
        self._inner: list[Group] = []

    @property
    def node_memory(self) -> NodeMemory:
        """What the ranks of the one node share, made at first use, by all ranks together."""
        if self._memory is None:
            self._memory = NodeMemory(self.comm, self.ranks, self.watch.check if self.watch else None)
        return self._memory

    @cached_property
    def columns(self) -> int:
        """How many ranks every node has at least."""
        return columns(self.placement)

    @cached_property
    def node(self) -> Group:
        """The ranks of this rank's node; asked for by all ranks together the first time."""
        return self._split(self.placement.node_of(self.rank), place([0] * len(self._node_ranks)))

    @cached_property
    def column(self) -> Group | None:
        """The ranks in this rank's place of their nodes; None where some node has no such place. Asked for by all."""
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
        group = Group(comm, placement, self.table, self.watch, ranks)
        self._inner.append(group)
        return group

    def find(self, algorithm: str) -> Family:
        """The schedule of that name for where these ranks sit."""
        if algorithm not in self._families:
            self._families[algorithm] = find(algorithm, self.placement)
        return self._families[algorithm]

    def broadcast_from(self, algorithm: str, root: int) -> Algorithm:
        """The broadcast of that name from any root: the ranks move up by as many places."""
        if (algorithm, root) not in self._rotated:
            from_first = self.find(algorithm).broadcast
            assert from_first is not None, "the choice offers what the schedule has"
            order = [(place + root) % self.size for place in range(self.size)]
            self._rotated[algorithm, root] = renumber(from_first, order)
        return self._rotated[algorithm, root]

    def plan(self, collective: str, algorithm: str, dtype: torch.dtype, nbytes: int, wire: str | None = None) -> Plan:
        """Choose once for each dtype, size and wire."""
        key = collective, algorithm, wire, dtype, nbytes
        if key not in self._plans:
            if len(self._plans) == PLANS:
                self._plans.clear()
            arithmetic = arithmetic_of(dtype)
            narrow = wire_of(wire, dtype)
            flying = nbytes if narrow is None else narrow.nbytes(nbytes // dtype.itemsize)
            choice = self.choose(collective, algorithm, flying)
            words = f"{collective}({nbytes // dtype.itemsize} x {name_of(dtype)}, {choice.algorithm}"
            words += ")" if wire is None else f", wire {wire})"
            sweeps = collective == "allreduce" and choice.transport == "windows"
            if sweeps:
                sweeps = can_sweep(self.find(choice.algorithm).allreduce(self.rank, self.size), self.rank, self.size)
            self._plans[key] = Plan(choice, arithmetic, narrow, call(words), sweeps)
        return self._plans[key]

    def choose(self, collective: str, algorithm: str, nbytes: int) -> Choice:
        """What carries out a collective for that many bytes in flight."""
        if algorithm == "auto":
            return self.table.choose(collective, self.placement, nbytes)
        base, _, inner = algorithm.partition("/")
        if algorithm == "library" or (base, inner) == ("hierarchical", "library"):
            return Choice(algorithm, "library")
        if getattr(self.find(algorithm), collective) is None:
            raise UsageError(f"the schedule {algorithm!r} has no {collective}")
        if self.one_node and collective in SHARED:
            return Choice("direct" if base == "hierarchical" else algorithm, "windows")
        return Choice(algorithm, "messages")

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
        request = self.comm.Iallreduce(mine, most, MPI.MAX)
        try:
            wait(request, self.watch.check)
        except MismatchError:
            self.watch.abandon(request, mine, most)
            raise
        if (most != mine).any():
            self.disagree(what)

    def disagree(self, what: Call) -> None:
        """Raise MismatchError, when all ranks know that they differ."""
        said = self._talk.allgather(what.words)  # what did not match may still be under way on the others
        other, words = next((rank, words) for rank, words in enumerate(said) if words != what.words)
        raise MismatchError(difference(self.ranks[self.rank], what.words, self.ranks[other], words))

    def play(
        self,
        algorithm: Algorithm,
        tensor: torch.Tensor,
        number: int,
        wire: Wire | None = None,
        chunk_major: bool = False,
    ) -> None:
        """Play a schedule over messages on a contiguous tensor, in place. `number` is what `call` gave."""
        program = self._programs.get(algorithm)
        if program is None:
            program = self._programs[algorithm] = algorithm(self.rank, self.size)
        arithmetic, itemsize = arithmetic_of(tensor.dtype), tensor.dtype.itemsize
        landing = LANDING // (IN_FLIGHT * max(1, len(program.lanes)) * program.landing)
        pieces = cut(tensor.numel(), program.chunks, min(self.table.piece, landing) // itemsize, chunk_major)
        interrupted = self.watch.check if self.watch else lambda: None
        channel = MessageChannel(self._messages, memory_of(tensor), arithmetic, wire, number, interrupted)
        try:
            play(program, pieces, channel, IN_FLIGHT)
        except MismatchError:
            if self.watch is not None:
                self.watch.abandon(channel, tensor)
            raise

    def empty(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, zeroed tensor in a window where all ranks share a node, in the rank's own memory elsewhere."""
        if not self.one_node or self.size == 1:
            return torch.zeros(length, dtype=dtype)
        self.node_memory.signals.meet(call(f"empty({length} x {name_of(dtype)})"))
        return self.node_memory.empty(length, dtype)

    def free(self) -> None:
        """Give communicators and shared memory back, all ranks together."""
        for group in self._inner:
            group.free()
            group.comm.Free()
        self._inner.clear()
        self.__dict__.pop("node", None)
        self.__dict__.pop("column", None)
        if self._memory is not None:
            self._memory.free()
            self._memory = None
        self._plans.clear()
        if self.watch is not None and self._outer_watch is None:
            self.watch.free()
        self._messages.Free()
        self._talk.Free()
