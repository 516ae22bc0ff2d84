"""Reductions within one node for tensors in any memory, through slots in a shared window.

    flat             copy in, barrier, each rank reduces all slots                      1 barrier, p x n read by each
    reduce           copy the others' segments in, barrier, reduce the own, barrier, copy out     2 barriers a piece
    reduce_scatter   copy the others' chunks in, barrier, reduce the own chunk of all slots       1 barrier a piece

A rank reads its own contribution directly from the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.call import Call
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds, cut
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.signals import Signals
from unisono.transports.slot_size import SLOTS_PER_RANK
from unisono.transports.slots import Slots

MAX_ADDRESSES = 64
"""Number of addresses whose views are kept for one length of `flat`."""


class Staging:
    """Reductions through slots; all ranks of a node use it together."""

    def __init__(self, signals: Signals, slots: Slots) -> None:
        self._rank, self._size, self._signals, self._slots = signals.rank, signals.size, signals, slots
        self._view_cache: dict[Arithmetic, list[list[Any]]] = {}

    def _views(self, arithmetic: Arithmetic) -> list[Any]:
        """Return the elements of every rank's slot for the next barrier."""
        if arithmetic not in self._view_cache:
            self._view_cache[arithmetic] = [[arithmetic.view(slot) for slot in ranks] for ranks in self._slots.all]
        return self._view_cache[arithmetic][self._slots.number]

    def flat(self, nbytes: int, arithmetic: Arithmetic, call: Call) -> Callable[[int], None]:
        """Return a function of an address that reduces `nbytes` bytes there in place, all of them on every rank.

        `nbytes` is at most a slot. For a few bytes the Python code takes most of the time, so everything possible is
        computed beforehand. Views of the memory at an address are kept, because the same tensors return repeatedly.
        """
        slots = [[memoryview(slot)[:nbytes] for slot in ranks] for ranks in self._slots.all]  # type: ignore[arg-type]
        entries = [slot[self._rank] for slot in slots]
        views = [[arithmetic.view(part) for part in slot] for slot in slots]
        signals, barrier = self._signals, self._signals.barrier
        cache: dict[int, list[tuple[Any, Any, list[Step]]]] = {}
        whole = slice(None)

        def plan(address: int) -> list[tuple[Any, Any, list[Step]]]:
            payload = MPI.memory.fromaddress(address, nbytes)
            into = arithmetic.view(payload)
            return [(entry, payload, arithmetic.reduce(slot, into)) for entry, slot in zip(entries, views, strict=True)]

        def play(address: int) -> None:
            planned = cache.get(address)
            if planned is None:
                if len(cache) == MAX_ADDRESSES:
                    cache.clear()
                planned = cache[address] = plan(address)
            entry, payload, reductions = planned[
                (signals.sequence + 1) % SLOTS_PER_RANK
            ]  # as `Slots` has it, without the calls
            entry[whole] = payload
            barrier(call)
            for function, arguments in reductions:
                function(*arguments)

        return play

    def reduce(self, payload: Any, itemsize: int, arithmetic: Arithmetic, call: Call, root: int | None = None) -> None:
        """Reduce `payload`, a view of any length, in place: on `root` only, or on all ranks if it is None.

        Every rank reduces its segment of each piece.
        """
        here = root in (None, self._rank)
        pieces = cut(len(payload), 1, self._slots.nbytes // itemsize)
        for piece in range(pieces.pieces):
            part = payload[pieces.region(piece, 0)]
            slots = self._views(arithmetic)
            segments = [slice(*bounds(len(part), self._size, rank)) for rank in range(self._size)]
            own, others = segments[self._rank], [rank for rank in range(self._size) if rank != self._rank]
            entry = slots[self._rank]
            perform(arithmetic.copy(entry[segments[rank]], part[segments[rank]]) for rank in others)
            self._signals.barrier(call)
            sources = [part[own] if rank == self._rank else slot[own] for rank, slot in enumerate(slots)]
            into = sources[self._rank] if here else entry[own]
            perform(arithmetic.reduce(sources, into))
            if root is None:
                perform([arithmetic.copy(entry[own], into)])
            self._signals.barrier(call)
            if here:
                perform(arithmetic.copy(part[segments[rank]], slots[rank][segments[rank]]) for rank in others)

    def reduce_scatter(self, payload: Any, shard: Any, itemsize: int, arithmetic: Arithmetic, call: Call) -> None:
        """Reduce all ranks' `payload`; this rank's chunk goes into `shard`, or in place if that is None."""
        stride = self._slots.nbytes // (self._size * itemsize)  # elements of a slot that are there for each chunk
        whole = cut(len(payload), self._size, stride, chunk_major=True)
        start, _ = bounds(len(payload), self._size, self._rank)
        for piece in range(whole.pieces):
            slots = self._views(arithmetic)
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
            perform(arithmetic.reduce(sources, into))

    def clear(self) -> None:
        """Drop the views of the slots, which are about to be freed."""
        self._view_cache.clear()
