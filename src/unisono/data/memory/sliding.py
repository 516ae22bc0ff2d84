"""Where what comes in a shuffle is put: a plan. A rank's samples slide to and fro in its memory.

The segments of a rank lie side by side at one end of its memory; the rest is free. In each round one of them goes, to
many ranks, and what comes for it from many is put at the other end. Here they lie low and slide up:

    held         | 0 0 0 | 1 1 | . . . . |           9 rows, segments of 3 and 2
    round of 1   | 0 0 0 | 1 1 | . | 1'1'1' |        3 come for it, side by side in the order of who gives them
    round of 0   | . . . | 0'0'0' | 1'1'1' |         3 again; the next shuffle slides down, beginning with 0'

So beside what it holds a rank needs the largest segment free, and what chance may bring: as many samples come as go,
but for chance. Where it is not enough all ranks know before anything has moved.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.memory.dealing import counts_for

CHANCE = 5
"""Roots of the number of samples of a rank that are kept free for chance: its deviation is at most about one."""

Counts = NDArray[np.int64]
"""Of rows and blocks: in the last axis."""


def capacity(samples: int, nbytes: int, spare: int) -> tuple[int, int]:
    """Rows and bytes for a rank with so many samples of so many bytes, of which `spare` more are to be free."""
    rows = samples + spare + CHANCE * math.isqrt(samples)
    return rows, -(-nbytes * rows // samples)


def counts(to: NDArray[np.integer], rows: NDArray[np.int64], begins: NDArray[np.int64] | None, ranks: int) -> Counts:
    """What goes to each rank in each segment, (ranks, segments, 2); `to` is the rank that each sample goes to.

    Segment s is rows rows[s] to rows[s + 1] - 1. Row i has the blocks begins[i] to begins[i + 1] - 1; without `begins`
    each has one.
    """
    found = np.empty((len(rows) - 1, ranks, 2), np.int64)
    for segment, (first, last) in enumerate(pairwise(rows.tolist())):
        found[segment, :, 0] = counts_for(to[first:last], ranks)
        sizes = None if begins is None else np.diff(begins[first : last + 1])
        found[segment, :, 1] = found[segment, :, 0] if sizes is None else np.bincount(to[first:last], sizes, ranks)
    return found.swapaxes(0, 1)


def side_by_side(sizes: Counts) -> Counts:
    """Where the parts of all ranks begin, (ranks, ...), the first one at 0."""
    begins: Counts = sizes.cumsum(axis=0) - sizes
    return begins


class Plan(NamedTuple):
    """What a rank does with what comes."""

    cuts: Counts
    """Where its segments will begin, and the last one end: (segments + 1, 2)."""
    places: Counts
    """Where what each rank gives in each round is put: (ranks, segments, 2)."""
    rounds: range
    """The segments in the order in which they go."""
    short: Counts
    """What is missing, for nothing to be put over what is still needed: (2,)."""


def slide(cuts: Counts, comes: Counts, room: Counts, up: bool, laid_out: bool) -> Plan:
    """The plan of a rank whose segments lie between `cuts`, at the other end of its `room`.

    `comes` is what each rank gives in each round, (ranks, segments, 2). Where a segment is `laid_out` elsewhere before
    anything comes for it, that may be put over it.
    """
    sizes = comes.sum(axis=0)
    new = np.concatenate([np.zeros((1, 2), np.int64), sizes.cumsum(axis=0)])
    if up:
        new += room - new[-1]
    places = new[:-1] + side_by_side(comes)
    needed = cuts[:-1] if up == laid_out else cuts[1:]  # up to here, or from here on, in each round
    missing = needed - new[:-1] if up else new[1:] - needed
    rounds = range(len(sizes))
    return Plan(new, places, rounds[::-1] if up else rounds, missing.max(axis=0).clip(min=0))
