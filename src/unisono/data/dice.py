"""Random numbers of a sample: a pure function of (seed, epoch, sample), many samples at once.

Numbers are SplitMix64's (Steele, Lea and Flood 2014) of a counter that begins at a hash of seed, epoch and sample; 53
bits of each make a number from 0 to below 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

DRAWS = 24
"""Numbers that one sample may need: of a picture, ten parts are tried with two, and one has a place and is mirrored."""

STEP, FIRST, SECOND = (np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
"""The increment of the counter, and the factors that mix it."""


def dice(seed: int, epoch: int, samples: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """`count` numbers from 0 to below 1 for each sample, of shape (samples, count)."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)
    key = _mixed(_mixed(words[:1]) + words[1:] * STEP)
    begins = _mixed(key + samples.astype(np.uint64) * STEP)
    counters = begins[:, None] + np.arange(1, count + 1, dtype=np.uint64) * STEP
    return (_mixed(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Throws:
    """Numbers one by one."""

    def __init__(self, numbers: Iterable[float]) -> None:
        self.random: Callable[[], float] = iter(numbers).__next__


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * SECOND
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed
