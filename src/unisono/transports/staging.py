"""Collectives of one node for tensors that lie anywhere: through slots in a window that all ranks see.

    flat             copy in, meet, each rank sums all slots                              1 meeting, p x n read by each
    allreduce        copy the others' segments in, meet, sum the own, meet, copy out      2 meetings a piece
    part_reduce      copy in, meet, sum the own chunk of all slots into the shard         1 meeting a piece
    part_broadcast   copy the own shard in, meet, copy all slots out                      1 meeting a piece

Three slots take turns, by the number of the coming meeting. A slot that is written before meeting m is read until, at
the latest, its reader comes to meeting m+2, and is not written again before meeting m+3, when all have been to m+2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.mpi import MPI
from unisono.schedules.pieces import bounds, cut
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.windows import Call, Signals, Window

SLOT = 2 << 20
"""Bytes of a slot: large enough that meetings do not count; 0.25 to 4 MB were within a third of each other."""

SLOTS = 3

ADDRESSES = 64
"""Addresses whose views are kept for one length of `flat`."""


class Staging:
    """The slots of the ranks of a node. Made, used and freed by all of them together."""

    def __init__(self, comm: MPI.Intracomm, signals: Signals) -> None:
        self._rank, self._size, self._signals = comm.rank, comm.size, signals
        self._window = Window(comm, SLOTS * SLOT)
        self._kept: dict[Arithmetic, list[list[Any]]] = {}

    def _slots(self, number: int) -> list[memoryview]:
        """Every rank's slot of that number, as bytes."""
        return [memoryview(buffer)[number * SLOT : (number + 1) * SLOT] for buffer in self._window.buffers]

    def _views(self, arithmetic: Arithmetic) -> list[Any]:
        """The elements of every rank's slot of the coming meeting."""
        if arithmetic not in self._kept:
            self._kept[arithmetic] = [
                [arithmetic.view(slot) for slot in self._slots(number)] for number in range(SLOTS)
            ]
        return self._kept[arithmetic][(self._signals.turn + 1) % SLOTS]

    def flat(self, nbytes: int, arithmetic: Arithmetic, what: Call) -> Callable[[int], None]:
        """A function that sums the `nbytes` (at most SLOT) at the address it is given, in place: every rank sums all.

        For a few bytes what counts is how little Python runs, so all that can be known beforehand is; views of the
        memory at an address are kept, since the same tensors come again and again.
        """
        slots = [[slot[:nbytes] for slot in self._slots(number)] for number in range(SLOTS)]
        entries = [slot[self._rank] for slot in slots]
        views = [[arithmetic.view(part) for part in slot] for slot in slots]
        signals, meet = self._signals, self._signals.meet
        seen: dict[int, tuple[Any, list[list[Step]]]] = {}

        def plan(address: int) -> tuple[Any, list[list[Step]]]:
            payload = MPI.memory.fromaddress(address, nbytes)
            into = arithmetic.view(payload)
            return payload, [arithmetic.reduce(slot, into) for slot in views]

        def play(address: int) -> None:
            known = seen.get(address)
            if known is None:
                if len(seen) == ADDRESSES:
                    seen.clear()
                known = seen[address] = plan(address)
            payload, totals = known
            slot = (signals.turn + 1) % SLOTS
            entries[slot][:] = payload
            meet(what)
            for function, arguments in totals[slot]:
                function(*arguments)

        return play

    def allreduce(self, payload: Any, itemsize: int, arithmetic: Arithmetic, what: Call) -> None:
        """Sum `payload`, a view of any length, in place: every rank sums its segment of each piece."""
        pieces = cut(len(payload), 1, SLOT // itemsize)
        for piece in range(pieces.pieces):
            part = payload[pieces.region(piece, 0)]
            slots = self._views(arithmetic)
            segments = [slice(*bounds(len(part), self._size, rank)) for rank in range(self._size)]
            own, others = segments[self._rank], [rank for rank in range(self._size) if rank != self._rank]
            entry = slots[self._rank]
            perform(arithmetic.copy(entry[segments[rank]], part[segments[rank]]) for rank in others)
            self._signals.meet(what)
            sources = [part[own] if rank == self._rank else slot[own] for rank, slot in enumerate(slots)]
            perform(arithmetic.reduce(sources, sources[self._rank]))
            perform([arithmetic.copy(entry[own], sources[self._rank])])
            self._signals.meet(what)
            perform(arithmetic.copy(part[segments[rank]], slots[rank][segments[rank]]) for rank in others)

    def part_reduce(
        self, payload: Any, shard: Any, itemsize: int, arithmetic: Arithmetic, what: Call, owners: int = 0
    ) -> None:
        """Sum all ranks' `payload`; this rank's chunk of the sum goes into `shard`, which may be part of `payload`.

        There is a chunk for each of the first `owners` ranks; 0 means all.
        """
        owners = owners or self._size
        stride = SLOT // (owners * itemsize)  # elements of a slot that are there for each chunk
        whole = cut(len(payload), owners, stride, chunk_major=True)
        start, _ = bounds(len(payload), owners, self._rank)
        for piece in range(whole.pieces):
            slots = self._views(arithmetic)
            for chunk in range(owners):
                part = payload[whole.region(piece, chunk)]
                perform([arithmetic.copy(slots[self._rank][chunk * stride : chunk * stride + len(part)], part)])
            self._signals.meet(what)
            if self._rank >= owners:
                continue
            where = whole.region(piece, self._rank)
            first = self._rank * stride
            mine = [slot[first : first + where.stop - where.start] for slot in slots]
            perform(arithmetic.reduce(mine, shard[where.start - start : where.stop - start]))

    def part_broadcast(
        self, shard: Any, out: Any, itemsize: int, arithmetic: Arithmetic, what: Call, owners: int = 0
    ) -> None:
        """Every owner's `shard` goes to its chunk of everyone's `out`, of which it may be a part itself.

        There is a chunk for each of the first `owners` ranks; 0 means all.
        """
        owners = owners or self._size
        whole = cut(len(out), owners, SLOT // itemsize, chunk_major=True)
        start, _ = bounds(len(out), owners, self._rank)
        for piece in range(whole.pieces):
            slots = self._views(arithmetic)
            if self._rank < owners:
                where = whole.region(piece, self._rank)
                part = shard[where.start - start : where.stop - start]
                perform([arithmetic.copy(slots[self._rank][: len(part)], part)])
            self._signals.meet(what)
            for rank, slot in enumerate(slots[:owners]):
                where = whole.region(piece, rank)
                perform([arithmetic.copy(out[where], slot[: where.stop - where.start])])

    def free(self) -> None:
        """Give the memory back, all ranks together."""
        self._kept.clear()
        self._window.free()
