"""Plan of the samples that go into each stripe.

    2 stripes at least, of at most 256 MB; 8 samples of 90 MB:      stripe 0   0 1       stripe 2   4 5
                                                                    stripe 1   2 3       stripe 3   6 7

Samples keep their order. So a rank that reads a stretch of them touches few stripes, and all ranks together read from
many stripes at once (swCaffe 5.2: data striped over 32 disks in blocks of 256 MB, so that a batch touches two at most).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

INDEX = "index.arrow"
BATCH_BYTES = 4 << 20
"""Bytes of samples that share a checksum, the least that is read at once."""


def stripe_name(number: int) -> str:
    """Return the file name of a stripe."""
    return f"stripe-{number:05d}.arrow"


def plan_stripes(sizes: Sequence[int] | NDArray[np.int64], stripes: int, stripe_bytes: int) -> list[int]:
    """Return the bounds of stripes: stripe s has the samples bounds[s] to bounds[s + 1] - 1.

    There are at least `stripes` stripes of about equal bytes according to `sizes`, and more if one would exceed
    `stripe_bytes`, but never more than samples. A sample larger than `stripe_bytes` has a stripe of its own.
    """
    samples = len(sizes)
    if samples == 0:
        return [0]
    counted = np.clip(np.asarray(sizes, np.int64), 1, stripe_bytes)
    ends = np.cumsum(counted)
    full = np.flatnonzero(counted == stripe_bytes)
    alone = {*full.tolist(), *(full + 1).tolist()}
    count = min(samples, max(stripes, -(-int(ends[-1]) // stripe_bytes)))
    while True:
        bounds = sorted(alone.union(_cut(ends, count)))
        if all(ends[stop - 1] - ends[start] + counted[start] <= stripe_bytes for start, stop in pairs(bounds)):
            return bounds
        count = min(samples, count + max(1, count // 8))


def pairs(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return the beginning and the end of each stretch."""
    return list(pairwise(bounds))


def _cut(ends: NDArray[np.int64], count: int) -> list[int]:
    """Return the bounds of `count` stretches of about equal bytes, none empty."""
    samples = len(ends)
    wanted = ends[-1] * np.arange(1, count) // count
    inner = np.searchsorted(ends, wanted, side="left") + 1
    least = np.arange(1, count)
    inner = np.clip(np.maximum.accumulate(inner), least, samples - count + least)
    inner = np.maximum.accumulate(inner - least) + least  # so that each has one at least
    return [0, *inner.tolist(), samples]
