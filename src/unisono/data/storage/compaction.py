"""Compaction plan: destinations of the samples that arrive in a shuffle, without a second copy of the memory.

The segments of a rank lie side by side at one end of its memory; the rest is free. In each round one segment is sent,
to many ranks, and its replacement, from many ranks, is put at the other end. Here segments move from the beginning to
the end:

    held         | 0 0 0 | 1 1 | . . . . |           9 rows, segments of 3 and 2
    round of 1   | 0 0 0 | 1 1 | . | 1'1'1' |        3 arrive, side by side in the order of their senders
    round of 0   | . . . | 0'0'0' | 1'1'1' |         3 again; the next shuffle moves back, beginning with 0'

So beside its samples a rank needs free memory for the largest segment and for random variation: as many samples arrive
as leave, apart from chance. If the memory is not enough, all ranks know it before any sample has moved.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.storage.partition import counts_for

SPARE_DEVIATIONS = 5
"""Rows kept free for chance, over the square root of a rank's samples: one such root is the largest std."""

Counts = NDArray[np.int64]
"""Numbers of rows and blocks, in the last axis."""


def capacity(samples: int, nbytes: int, spare: int) -> tuple[int, int]:
    """Return rows and bytes (or blocks) for `samples` samples of `nbytes` bytes in all, with `spare` more kept free."""
    rows = samples + spare + SPARE_DEVIATIONS * math.isqrt(samples)
    return rows, -(-nbytes * rows // samples)


def counts(to: NDArray[np.integer], rows: NDArray[np.int64], begins: NDArray[np.int64] | None, ranks: int) -> Counts:
    """Return rows and blocks for each rank in each segment, (ranks, segments, 2); `to` is the rank of each sample.

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
    """Return where the parts of all ranks begin if they lie side by side, (ranks, ...), the first one at 0."""
    begins: Counts = sizes.cumsum(axis=0) - sizes
    return begins


class CompactionPlan(NamedTuple):
    """Plan of a rank for the samples that arrive."""

    cuts: Counts
    """Row and block at which its segments will begin and the last one end: (segments + 1, 2)."""
    destinations: Counts
    """Row and block at which the samples from each rank in each round are put: (ranks, segments, 2)."""
    rounds: range
    """Segments in the order in which they are sent."""
    missing: Counts
    """Rows and blocks that are missing, so that nothing still needed would be overwritten: (2,)."""


def plan_compaction(
    cuts: Counts, received_counts: Counts, available: Counts, up: bool, laid_out: bool
) -> CompactionPlan:
    """Return the plan of a rank whose segments lie between `cuts` and move to the other end of its memory, `available`.

    They move to the end if `up`, else to the beginning. `received_counts` has the rows and blocks from each rank in
    each round, (ranks, segments, 2). If a segment is `laid_out` elsewhere before its replacement arrives, the
    replacement may overwrite it.
    """
    sizes = received_counts.sum(axis=0)
    new = np.concatenate([np.zeros((1, 2), np.int64), sizes.cumsum(axis=0)])
    if up:
        new += available - new[-1]
    destinations = new[:-1] + side_by_side(received_counts)
    needed = cuts[:-1] if up == laid_out else cuts[1:]  # up to here, or from here on, in each round
    overlap = needed - new[:-1] if up else new[1:] - needed
    rounds = range(len(sizes))
    return CompactionPlan(new, destinations, rounds[::-1] if up else rounds, overlap.max(axis=0).clip(min=0))
