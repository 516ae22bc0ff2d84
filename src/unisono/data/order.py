"""Order of samples: a pure function of (seed, epoch, step), the same on every rank and for any number of ranks.

10 samples, batches of 4, 2 ranks:

    epoch's permutation   7 2 9 4 | 0 5 1 8 | 3 6
    step                     0         1       2
    rank 0                 7 2       0 5      3
    rank 1                 9 4       1 8      6
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from unisono.schedules.pieces import bounds


def permutation(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the order in which an epoch visits the samples: a permutation, int64, shape (samples,)."""
    return np.random.Generator(np.random.Philox(key=(seed, epoch))).permutation(samples)


def steps_of(samples: int, batch: int) -> int:
    """Return the number of steps of an epoch; the last step may be short."""
    return -(-samples // batch)


def share(order: NDArray[np.int64], batch: int, step: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """Return the samples of one rank in one step of an epoch with this order: its part of the global batch."""
    whole = order[step * batch : (step + 1) * batch]
    start, stop = bounds(len(whole), ranks, rank)
    return whole[start:stop]


def held_out(samples: int, batch: int, rank: int, ranks: int) -> Iterator[range]:
    """Yield a rank's stretch of the test samples, in order, in batches of at most ceil(batch / ranks) samples."""
    start, stop = bounds(samples, ranks, rank)
    own = -(-batch // ranks)
    for first in range(start, stop, own):
        yield range(first, min(stop, first + own))


def ranks_of(samples: int, batch: int, ranks: int) -> NDArray[np.int32]:
    """Return the rank that sees the sample at each place of an epoch's order, int32: the inverse of `share`."""
    whole, rest = divmod(samples, batch)
    seen = np.empty(samples, np.int32)
    seen[: whole * batch].reshape(whole, batch)[:] = _ranks_of_step(batch, ranks)
    seen[whole * batch :] = _ranks_of_step(rest, ranks)
    return seen


def _ranks_of_step(length: int, ranks: int) -> NDArray[np.int64]:
    return ((np.arange(length) + 1) * ranks - 1) // max(1, length)
