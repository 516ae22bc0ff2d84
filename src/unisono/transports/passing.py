"""Moves among the ranks of one node, through their slots: one copy in, one copy out.

    share       copy the own part in, meet, copy the others' out                      1 meeting a piece

    exchange    what a rank sends is a stream that goes through its slot piece by piece; all sizes stand in front:

                rank 0 of 3   | sizes | to 1 ..... | to 2 ....... |
                rank 1        | sizes | to 2 .. | to 0 .......... |                   1 meeting a piece
                rank 2        | sizes | to 0 .......... | to 1 .. |
                              cut at each slot's end ─┴─

Everyone begins with the rank after it, so that nobody is all others' first. Each rank sees all sizes, of what is sent
and of what is expected: where two do not fit, all ranks are told the same.
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
    """Used by all ranks of a node together. What moves is flat arrays of bytes."""

    def __init__(self, signals: Signals, slots: Slots) -> None:
        self._rank, self._size, self._signals, self._slots = signals.rank, signals.size, signals, slots

    def share(self, parts: Sequence[Array], what: Call) -> None:
        """Give rank r's parts[r] to all. The part of each rank is as long on all of them."""
        longest = max(len(part) for part in parts)
        for start in range(0, max(1, longest), self._slots.nbytes):
            slots = self._put([(0, parts[self._rank])], start, what)
            for rank in _after(self._rank, self._size):
                _take(slots[rank], start, 0, parts[rank])

    def all_to_all(self, sends: Array, receives: Array, what: Call) -> None:
        """Send row d of `sends` to rank d, fill row s of `receives` with what rank s sends: p rows, all as long."""
        length = receives.shape[1]
        firsts = [(self._rank - source - 1) % self._size * length for source in range(self._size)]
        stream = list(_laid([sends[peer] for peer in _after(self._rank, self._size)]))
        self._flow(stream, self._put(stream, 0, what), list(receives), firsts, (self._size - 1) * length, what)
        receives[self._rank] = sends[self._rank]

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array], what: Call) -> None:
        """Send sends[d] to rank d, and fill receives[s] with what rank s sends.

        Raises MismatchError on every rank when one sends another length than the other expects.
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
        """Take what begins at firsts[s] of the stream of each rank s. The first piece is in `slots` already."""
        sources = _after(self._rank, self._size)[::-1]
        for start in range(0, longest, self._slots.nbytes):
            if start:
                slots = self._put(stream, start, what)
            for source in sources:
                _take(slots[source], start, firsts[source], receives[source])

    def _ahead(self, lengths: Sequence[int], source: int) -> int:
        """Bytes that a source sends to others before it sends to this rank."""
        others = _after(source, self._size)[: (self._rank - source - 1) % self._size]
        return sum(lengths[other] for other in others)

    def _put(self, stream: Iterable[tuple[int, Array]], start: int, what: Call) -> list[Array]:
        """Put the piece of a stream that begins at `start` into the own slot, and meet; every rank's slot."""
        slots = self._slots.coming
        for first, part in stream:
            low, high = max(start, first), min(start + self._slots.nbytes, first + len(part))
            if low < high:
                slots[self._rank][low - start : high - start] = part[low - first : high - first]
        self._signals.meet(what)
        return slots

    def _compare(self, goes: Sequence[Sequence[int]], comes: Sequence[Sequence[int]], what: Call) -> None:
        """Compare goes[s][d], what rank s sends to rank d, with comes[d][s], what that one expects."""
        if [tuple(line) for line in goes] == list(zip(*comes, strict=True)):
            return
        everyone, ranks = range(self._size), self._signals.ranks
        source, target = next((s, d) for s in everyone for d in everyone if goes[s][d] != comes[d][s])
        sent, expected = goes[source][target], comes[target][source]
        raise MismatchError(sizes_differ(what.words, ranks[source], ranks[target], sent, expected))


def _take(slot: Array, start: int, first: int, part: Array) -> None:
    """Fill what a slot has of a part: the slot has the piece from `start` of a stream, where the part is at `first`."""
    low, high = max(start, first), min(start + len(slot), first + len(part))
    if low < high:
        part[low - first : high - first] = slot[low - start : high - start]


def _laid(parts: Sequence[Array]) -> Iterator[tuple[int, Array]]:
    """The parts of a stream, and where in it each begins."""
    first = 0
    for part in parts:
        yield first, part
        first += len(part)


def _after(rank: int, size: int) -> list[int]:
    """The other ranks, from the one after `rank` on."""
    return [*range(rank + 1, size), *range(rank)]
