"""Data exchange among the ranks of one node through their slots: one copy in, one copy out.

    all_gather     copy the own part in, barrier, copy the others' out                1 barrier a piece

    all_to_all_v   sent data of a rank is a stream that goes through its slot piece by piece, after all its sizes:

                rank 0 of 3   | sizes | to 1 ..... | to 2 ....... |
                rank 1        | sizes | to 2 .. | to 0 .......... |                   1 barrier a piece
                rank 2        | sizes | to 0 .......... | to 1 .. |
                              cut at each slot's end ─┴─

Each rank begins with the next one, so that no rank is the first of all others. Each rank sees all sent and all expected
sizes: if two differ, all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from unisono.call import Call
from unisono.errors import MismatchError
from unisono.transports.arithmetic import Array
from unisono.transports.delivery import size_mismatch
from unisono.transports.node_memory import NodeMemory


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
