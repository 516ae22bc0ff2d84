"""Data exchange among the ranks of one node through their slots: one copy in, one copy out. "Meet" is a barrier.

    share       copy the own part in, meet, copy the others' out                      1 meeting a piece

    exchange    what a rank sends is a stream that goes through its slot piece by piece; all sizes stand in front:

                rank 0 of 3   | sizes | to 1 ..... | to 2 ....... |
                rank 1        | sizes | to 2 .. | to 0 .......... |                   1 meeting a piece
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
from unisono.transports.delivery import sizes_differ
from unisono.transports.signals import Signals
from unisono.transports.slots import Slots


class Passing:
    """Exchange of flat arrays of bytes; all ranks of a node use it together."""

    def __init__(self, signals: Signals, slots: Slots) -> None:
        self._rank, self._size, self._signals, self._slots = signals.rank, signals.size, signals, slots

    def share(self, parts: Sequence[Array], what: Call) -> None:
        """Copy parts[r] of rank r to all ranks. Each part has the same length on all ranks."""
        longest = max(len(part) for part in parts)
        for start in range(0, max(1, longest), self._slots.nbytes):
            slots = self._put([(0, parts[self._rank])], start, what)
            for rank in _after(self._rank, self._size):
                _take(slots[rank], start, 0, parts[rank])

    def all_to_all(self, sends: Array, receives: Array, what: Call) -> None:
        """Send row d of `sends` to rank d, fill row s of `receives` from rank s. Both have p rows of equal length."""
        length = receives.shape[1]
        firsts = [(self._rank - source - 1) % self._size * length for source in range(self._size)]
        stream = list(_laid([sends[peer] for peer in _after(self._rank, self._size)]))
        self._flow(stream, self._put(stream, 0, what), list(receives), firsts, (self._size - 1) * length, what)
        receives[self._rank] = sends[self._rank]

    def all_to_all_v(self, sends: Sequence[Array], receives: Sequence[Array], what: Call) -> None:
        """Send sends[d] to rank d, and fill receives[s] from rank s.

        Raises MismatchError on every rank if a rank sends another length than the receiver expects.
        """
        own = np.array([[len(part) for part in sends], [len(part) for part in receives]], np.int64)
        parts = (sends[peer] for peer in _after(self._rank, self._size))
        stream = list(_laid([own.view(np.uint8).reshape(-1), *parts]))
        slots = self._put(stream, 0, what)
        sizes = [slot[: own.nbytes].view(np.int64).tolist() for slot in slots]
        goes = [line[: self._size] for line in sizes]
        self._compare(goes, [line[self._size :] for line in sizes], what)
        firsts = [own.nbytes + self._ahead(line, source) for source, line in enumerate(goes)]
        longest = own.nbytes + max(sum(line) - line[source] for source, line in enumerate(goes))
        self._flow(stream, slots, receives, firsts, longest, what)
        receives[self._rank][:] = sends[self._rank]

    def _flow(
        self,
        stream: Sequence[tuple[int, Array]],
        slots: list[Array],
        receives: Sequence[Array],
        firsts: Sequence[int],
        longest: int,
        what: Call,
    ) -> None:
        """Read receives[s] at firsts[s] of the stream of each rank s. The first piece is in `slots` already."""
        sources = _after(self._rank, self._size)[::-1]
        for start in range(0, longest, self._slots.nbytes):
            if start:
                slots = self._put(stream, start, what)
            for source in sources:
                _take(slots[source], start, firsts[source], receives[source])

    def _ahead(self, lengths: Sequence[int], source: int) -> int:
        """Return the number of bytes that a source sends to others before those to this rank."""
        others = _after(source, self._size)[: (self._rank - source - 1) % self._size]
        return sum(lengths[other] for other in others)

    def _put(self, stream: Iterable[tuple[int, Array]], start: int, what: Call) -> list[Array]:
        """Write the piece of a stream at `start` into the own slot, wait in a barrier, and return all ranks' slots."""
        slots = self._slots.coming
        for first, part in stream:
            low, high = max(start, first), min(start + self._slots.nbytes, first + len(part))
            if low < high:
                slots[self._rank][low - start : high - start] = part[low - first : high - first]
        self._signals.meet(what)
        return slots

    def _compare(self, goes: Sequence[Sequence[int]], comes: Sequence[Sequence[int]], what: Call) -> None:
        """Raise MismatchError unless goes[s][d], bytes from s to d, equals comes[d][s], bytes that d expects."""
        if [tuple(line) for line in goes] == list(zip(*comes, strict=True)):
            return
        everyone, ranks = range(self._size), self._signals.ranks
        source, target = next((s, d) for s in everyone for d in everyone if goes[s][d] != comes[d][s])
        sent, expected = goes[source][target], comes[target][source]
        raise MismatchError(sizes_differ(what.words, ranks[source], ranks[target], sent, expected))


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
