"""Reductions within one node for tensors in any memory, through slots in a shared window.

    flat             copy in, barrier, each rank reduces all slots                      1 barrier, p x n read by each
    reduce           copy the others' segments in, barrier, reduce the own, barrier, copy out     2 barriers a piece

                     rank 0's slot   | ...... | B0 | C0 |        rank 1 reduces B0, its own B and B2, and writes the
                     rank 1's slot   | A1 | ...... | C1 |        result over B0 and B2: each rank finds all results in
                     rank 2's slot   | A2 | B2 | ...... |        its own slot. The lines that carried the terms carry
                                                                the result: one line changes caches twice, where a
                                                                result in a slot of its own moves two lines twice
    reduce_scatter   copy the others' chunks in, barrier, reduce the own chunk of all slots       1 barrier a piece

A rank reads its own contribution directly from the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.call import Call
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds, cut
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.signals import INLINE_BYTES, Signals
from unisono.transports.slots import Slots


class Staging:
    """Reductions through slots; all ranks of a node use it together."""

    def __init__(self, signals: Signals, slots: Slots) -> None:
        self._rank, self._size, self._signals, self._slots = signals.rank, signals.size, signals, slots
        self._view_cache: dict[Arithmetic, list[list[Any]]] = {}

    def _views(self, arithmetic: Arithmetic) -> list[list[Any]]:
        """Return the elements of every rank's slots, by slot number."""
        if arithmetic not in self._view_cache:
            self._view_cache[arithmetic] = [[arithmetic.view(slot) for slot in ranks] for ranks in self._slots.all]
        return self._view_cache[arithmetic]

    def flat(self, nbytes: int, arithmetic: Arithmetic, call: Call) -> Callable[[int], Callable[[], None]]:
        """Return a function of an address that prepares the reduction of `nbytes` bytes there, in place, on every rank.

        `nbytes` is at most a slot. For a few bytes the Python code takes most of the time, so everything possible is
        computed beforehand. The shortest payloads travel beside the tokens of the barrier.
        """
        signals, barrier, whole = self._signals, self._signals.prepare_barrier(call), slice(None)
        inline = nbytes <= INLINE_BYTES
        lines: Any = signals.inline if inline else self._slots.all
        slots = [[memoryview(slot)[:nbytes] for slot in ranks] for ranks in lines]
        entries = [slot[self._rank] for slot in slots]
        views = [[arithmetic.view(part) for part in slot] for slot in slots]
        count = len(slots)

        def prepare(address: int) -> Callable[[], None]:
            payload: Any = MPI.memory.fromaddress(address, nbytes)
            into = arithmetic.view(payload)
            planned = [(entry, arithmetic.reduce(slot, into)) for entry, slot in zip(entries, views, strict=True)]

            def play() -> None:
                entry, reductions = planned[(signals.sequence + 1) % count]
                entry[whole] = payload
                barrier()
                for function, arguments in reductions:
                    function(*arguments)

            return play

        return prepare

    def reduce(
        self, payload: Any, itemsize: int, arithmetic: Arithmetic, call: Call, root: int | None = None
    ) -> Callable[[], None]:
        """Return a function that reduces `payload`, a view of any length, in place: on `root`, or if None on all ranks.

        Every rank reduces its segment of each piece. The steps of a payload of one piece are planned here, once.
        """
        cuts = cut(len(payload), 1, self._slots.nbytes // itemsize)
        parts = [payload[cuts.region(piece, 0)] for piece in range(cuts.pieces)]
        barrier, slots = self._signals.prepare_barrier(call), self._slots
        plans: list[list[list[Step]]] = []
        if len(parts) == 1:
            plans = [self._plan_piece(parts[0], views, arithmetic, root) for views in self._views(arithmetic)]

        def play() -> None:
            for part in parts:
                number = slots.number
                steps = (
                    plans[number]
                    if plans
                    else self._plan_piece(part, self._views(arithmetic)[number], arithmetic, root)
                )
                copy_in, reduction, copy_out = steps
                perform(copy_in)
                barrier()
                perform(reduction)
                barrier()
                perform(copy_out)

        return play

    def _plan_piece(
        self, part: Any, slots: Sequence[Any], arithmetic: Arithmetic, root: int | None
    ) -> list[list[Step]]:
        """Return the steps of this rank before, between and after the two barriers of a piece."""
        rank, size = self._rank, self._size
        segments = [slice(*bounds(len(part), size, one)) for one in range(size)]
        own, others, entry = segments[rank], [one for one in range(size) if one != rank], slots[rank]
        sources = [part[own] if one == rank else slot[own] for one, slot in enumerate(slots)]
        into = part[own] if root in (None, rank) else entry[own]
        readers = others if root is None else {root} - {rank}
        return [
            [arithmetic.copy(entry[segments[one]], part[segments[one]]) for one in others],
            [
                *arithmetic.reduce(sources, into, sources[0]),
                *(arithmetic.copy(slots[one][own], into) for one in readers),
            ],
            [arithmetic.copy(part[segments[one]], entry[segments[one]]) for one in others if root in (None, rank)],
        ]

    def reduce_scatter(self, payload: Any, shard: Any, itemsize: int, arithmetic: Arithmetic, call: Call) -> None:
        """Reduce all ranks' `payload`; this rank's chunk goes into `shard`, or in place if that is None."""
        stride = self._slots.nbytes // (self._size * itemsize)  # elements of a slot that are there for each chunk
        whole = cut(len(payload), self._size, stride, chunk_major=True)
        start, _ = bounds(len(payload), self._size, self._rank)
        for piece in range(whole.pieces):
            slots = self._views(arithmetic)[self._slots.number]
            for chunk in range(self._size):
                if chunk != self._rank:
                    part = payload[whole.region(piece, chunk)]
                    perform([arithmetic.copy(slots[self._rank][chunk * stride : chunk * stride + len(part)], part)])
            self._signals.barrier(call)
            where = whole.region(piece, self._rank)
            mine, first = payload[where], self._rank * stride
            sources = [slot[first : first + len(mine)] for slot in slots]
            sources[self._rank] = mine
            into = mine if shard is None else shard[where.start - start : where.stop - start]
            perform(arithmetic.reduce(sources, into, sources[0]))

    def clear(self) -> None:
        """Drop the views of the slots, which are about to be freed."""
        self._view_cache.clear()
