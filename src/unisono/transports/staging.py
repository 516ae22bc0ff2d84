"""Collectives within one node for tensors in any memory, through slots in a shared window: reductions, and transfers
with one copy in and one copy out.

    flat             copy in, barrier, each rank reduces all slots                      1 barrier, p x n read by each
    reduce           copy the others' segments in, barrier, reduce the own, barrier, copy out     2 barriers a piece

                     rank 0's slot   | ...... | B0 | C0 |        rank 1 reduces B0, its own B and B2, and writes the
                     rank 1's slot   | A1 | ...... | C1 |        result over B0 and B2: each rank finds all results in
                     rank 2's slot   | A2 | B2 | ...... |        its own slot. The lines that carried the terms carry
                                                                the result: one line changes caches twice, where a
                                                                result in a slot of its own moves two lines twice
    reduce_scatter   copy the others' chunks in, barrier, reduce the own chunk of all slots       1 barrier a piece

    all_gather       copy the own part in, barrier, copy the others' out                1 barrier a piece
    all_to_all_v     sent data of a rank is a stream that goes through its slot piece by piece, after all its sizes:

                rank 0 of 3   | sizes | to 1 ..... | to 2 ....... |
                rank 1        | sizes | to 2 .. | to 0 .......... |                   1 barrier a piece
                rank 2        | sizes | to 0 .......... | to 1 .. |
                              cut at each slot's end ─┴─

Each rank begins with the next one, so that no rank is the first of all others. Each rank sees all sent and all expected
sizes: if two differ, all ranks raise the same error. A rank reads its own contribution to a sum directly from the
tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from unisono.call import Call
from unisono.errors import MismatchError
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds, cut
from unisono.transports.arithmetic import Arithmetic, Array, Step, perform
from unisono.transports.messages import size_mismatch
from unisono.transports.node_memory import NodeMemory
from unisono.transports.plan import Plan, Play, Prepared
from unisono.transports.signals import INLINE_BYTES


def flat_allreduce(memory: NodeMemory, plan: Plan, _: object) -> Prepared:
    """Prepare the allreduce of `flat`, in parts that fit a slot."""
    starts = range(0, max(1, plan.nbytes), memory.slot)
    parts = [(start, _flat(memory, plan, min(memory.slot, plan.nbytes - start))) for start in starts]

    def at(address: int, _: int) -> Play:
        plays = [prepare(address + first, 0) for first, prepare in parts]
        if len(plays) == 1:
            return plays[0]

        def play() -> None:
            for one in plays:
                one()

        return play

    return at


def _flat(memory: NodeMemory, plan: Plan, nbytes: int) -> Prepared:
    """Prepare the reduction of a part of `nbytes` bytes, at most a slot.

    For a few bytes the Python code takes most of the time, so everything possible is computed beforehand. The shortest
    payloads travel beside the tokens of the barrier.
    """
    signals, barrier, whole = memory.signals, memory.signals.prepare_barrier(plan.call), slice(None)
    lines: Any = signals.inline if nbytes <= INLINE_BYTES else memory.slots
    slots = [[memoryview(slot)[:nbytes] for slot in ranks] for ranks in lines]
    arithmetic, entries, count = plan.arithmetic, [slot[memory.rank] for slot in slots], len(slots)
    views = [[arithmetic.view(part) for part in slot] for slot in slots]

    def at(address: int, _: int) -> Play:
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

    return at


def staged_reduce(memory: NodeMemory, plan: Plan, payload: Any, root: int | None = None) -> Play:
    """Return a function that reduces `payload`, a view of any length, in place: on `root`, or if None on all ranks.

    Every rank reduces its segment of each piece. The steps of a payload of one piece are planned here, once.
    """
    cuts = cut(len(payload), 1, memory.slot // plan.dtype.itemsize)
    parts = [payload[cuts.region(piece, 0)] for piece in range(cuts.pieces)]
    barrier, views = memory.signals.prepare_barrier(plan.call), memory.views(plan.arithmetic)

    def steps_of(part: Any, number: int) -> list[list[Step]]:
        return _plan_piece(part, views[number], memory.rank, plan.arithmetic, root)

    plans = [steps_of(parts[0], number) for number in range(len(views))] if len(parts) == 1 else []

    def play() -> None:
        for part in parts:
            number = memory.number
            copy_in, reduction, copy_out = plans[number] if plans else steps_of(part, number)
            perform(copy_in)
            barrier()
            perform(reduction)
            barrier()
            perform(copy_out)

    return play


def _plan_piece(
    part: Any, slots: Sequence[Any], rank: int, arithmetic: Arithmetic, root: int | None
) -> list[list[Step]]:
    """Return the steps of this rank before, between and after the two barriers of a piece."""
    size = len(slots)
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


def reduce_scatter_by_slots(memory: NodeMemory, plan: Plan, payload: Any, shard: Any) -> None:
    """Reduce all ranks' `payload`; this rank's chunk goes into `shard`, which may be that chunk of the payload."""
    arithmetic, rank, size = plan.arithmetic, memory.rank, memory.size
    stride = memory.slot // (size * plan.dtype.itemsize)  # elements of a slot that are there for each chunk
    whole = cut(len(payload), size, stride, chunk_major=True)
    start, _ = bounds(len(payload), size, rank)
    for piece in range(whole.pieces):
        slots = memory.views(arithmetic)[memory.number]
        for chunk in range(size):
            if chunk != rank:
                part = payload[whole.region(piece, chunk)]
                perform([arithmetic.copy(slots[rank][chunk * stride : chunk * stride + len(part)], part)])
        memory.signals.barrier(plan.call)
        where = whole.region(piece, rank)
        mine, first = payload[where], rank * stride
        sources = [slot[first : first + len(mine)] for slot in slots]
        sources[rank] = mine
        perform(arithmetic.reduce(sources, shard[where.start - start : where.stop - start], sources[0]))


class SlotTransfers:
    """Exchange of flat arrays of bytes in a call; all ranks of a node use it together."""

    def __init__(self, memory: NodeMemory, call: Call) -> None:
        self._rank, self._size, self._memory, self._call = memory.rank, memory.size, memory, call

    def all_gather(self, parts: Sequence[Array]) -> None:
        """Copy parts[r] of rank r to all ranks. Each part has the same length on all ranks."""
        longest = max(len(part) for part in parts)
        for start in range(0, max(1, longest), self._memory.slot):
            slots = self._put([(0, parts[self._rank])], start)
            for rank in _after(self._rank, self._size):
                _take(slots[rank], start, 0, parts[rank])

    def all_to_all(self, sends: Array, receives: Array) -> None:
        """Send row d of `sends` to rank d, fill row s of `receives` from rank s. Both have p rows of equal length."""
        length = receives.shape[1]
        firsts = [(self._rank - source - 1) % self._size * length for source in range(self._size)]
        stream = list(_laid([sends[peer] for peer in _after(self._rank, self._size)]))
        self._flow(stream, self._put(stream, 0), list(receives), firsts, (self._size - 1) * length)
        receives[self._rank] = sends[self._rank]

    def all_to_all_v(self, sends: Sequence[Array], receives: Sequence[Array]) -> None:
        """Send sends[d] to rank d, and fill receives[s] from rank s.

        Raises MismatchError on every rank if a rank sends another length than the receiver expects.
        """
        own = np.array([[len(part) for part in sends], [len(part) for part in receives]], np.int64)
        parts = (sends[peer] for peer in _after(self._rank, self._size))
        stream = list(_laid([own.view(np.uint8).reshape(-1), *parts]))
        slots = self._put(stream, 0)
        sizes = [slot[: own.nbytes].view(np.int64).tolist() for slot in slots]
        outgoing = [row[: self._size] for row in sizes]
        self._compare(outgoing, [row[self._size :] for row in sizes])
        firsts = [own.nbytes + self._ahead(row, source) for source, row in enumerate(outgoing)]
        longest = own.nbytes + max(sum(row) - row[source] for source, row in enumerate(outgoing))
        self._flow(stream, slots, receives, firsts, longest)
        receives[self._rank][:] = sends[self._rank]

    def _flow(
        self,
        stream: Sequence[tuple[int, Array]],
        slots: list[Array],
        receives: Sequence[Array],
        firsts: Sequence[int],
        longest: int,
    ) -> None:
        """Read receives[s] at firsts[s] of the stream of each rank s. The first piece is in `slots` already."""
        sources = _after(self._rank, self._size)[::-1]
        for start in range(0, longest, self._memory.slot):
            if start:
                slots = self._put(stream, start)
            for source in sources:
                _take(slots[source], start, firsts[source], receives[source])

    def _ahead(self, lengths: Sequence[int], source: int) -> int:
        """Return the number of bytes that a source sends to others before those to this rank."""
        others = _after(source, self._size)[: (self._rank - source - 1) % self._size]
        return sum(lengths[other] for other in others)

    def _put(self, stream: Iterable[tuple[int, Array]], start: int) -> list[Array]:
        """Write the piece of a stream at `start` into the own slot, wait in a barrier, and return all ranks' slots."""
        slots = self._memory.slots[self._memory.number]
        for first, part in stream:
            low, high = max(start, first), min(start + self._memory.slot, first + len(part))
            if low < high:
                slots[self._rank][low - start : high - start] = part[low - first : high - first]
        self._memory.signals.barrier(self._call)
        return slots

    def _compare(self, outgoing: Sequence[Sequence[int]], incoming: Sequence[Sequence[int]]) -> None:
        """Raise MismatchError unless outgoing[s][d] (bytes s sends d) equals incoming[d][s] (bytes d expects of s)."""
        if [tuple(row) for row in outgoing] == list(zip(*incoming, strict=True)):
            return
        every_rank, ranks = range(self._size), self._memory.signals.ranks
        source, target = next((s, d) for s in every_rank for d in every_rank if outgoing[s][d] != incoming[d][s])
        sent, expected = outgoing[source][target], incoming[target][source]
        raise MismatchError(size_mismatch(self._call.words, ranks[source], ranks[target], sent, expected))


def _take(slot: Array, start: int, first: int, part: Array) -> None:
    """Copy the bytes of a part, at `first` of a stream, from a slot with the stream's piece at `start`."""
    low, high = max(start, first), min(start + len(slot), first + len(part))
    if low < high:
        part[low - first : high - first] = slot[low - start : high - start]


def _laid(parts: Sequence[Array]) -> Iterator[tuple[int, Array]]:
    """Yield the offset of each part in a stream, and the part."""
    first = 0
    for part in parts:
        yield first, part
        first += len(part)


def _after(rank: int, size: int) -> list[int]:
    """Return the other ranks, beginning with the one after `rank`."""
    return [*range(rank + 1, size), *range(rank)]
