"""Counter-based random numbers of a sample: a pure function of (seed, epoch, sample), for many samples at once.

The generator is SplitMix64 (Steele, Lea and Flood 2014). Its counter begins at a hash of seed, epoch and sample; 53
bits of each output make a number in [0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

DRAWS_PER_SAMPLE = 24
"""Largest count of numbers for a sample: an image tries ten crops with two each, then draws position and mirroring."""

INCREMENT, FIRST_FACTOR, SECOND_FACTOR = (
    np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Increment of the counter, and the factors that mix it."""


def uniform_numbers(seed: int, epoch: int, samples: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return `count` random numbers in [0, 1) for each sample: float64, shape (samples, count)."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], np.uint64)
    key = _mixed(_mixed(words[:1]) + words[1:] * INCREMENT)
    begins = _mixed(key + samples.astype(np.uint64) * INCREMENT)
    counters = begins[:, None] + np.arange(1, count + 1, dtype=np.uint64) * INCREMENT
    return (_mixed(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


class CounterRNG:
    """Random number generator of one sample: each call of `random()` returns the next of its numbers."""

    def __init__(self, numbers: Iterable[float]) -> None:
        self.random: Callable[[], float] = iter(numbers).__next__


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * FIRST_FACTOR
    numbers = (numbers ^ (numbers >> np.uint64(27))) * SECOND_FACTOR
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed
