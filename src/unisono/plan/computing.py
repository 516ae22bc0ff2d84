"""What is measured of a step, and what is predicted for it: values that the rest of the plan passes on.

computing   0 ──forward──────────────▶│──backward─────────────────▶ whole        seconds that go on computing
needed      w0  w1    w2   w3
ready                                       w3   w2     w1       w0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple


@dataclass(frozen=True)
class Computing:
    """When computing needs each parameter and has its gradient, in seconds of computing since the step began.

    Time in which it waits does not count. Parameters are known by their numbers.
    """

    needed: tuple[float, ...]
    ready: tuple[float, ...]
    whole: float
    update: float = 0.0
    """Seconds to update the parameters of one byte of gradients."""


class Load(NamedTuple):
    """A bucket as the plan sees it."""

    nbytes: int
    parameters: tuple[int, ...]
    """Those that lie in it, whole or in part."""


class Cost(NamedTuple):
    """What an exchange takes: `latency + nbytes * a_byte` seconds."""

    latency: float
    a_byte: float

    def seconds(self, nbytes: float) -> float:
        """For that many bytes of gradients."""
        return self.latency + nbytes * self.a_byte


class Prediction(NamedTuple):
    """Seconds of a step."""

    step: float
    communicating: float
    """In which an exchange goes on, whatever goes on beside it."""
    waiting: float
    """In which nothing is computed."""


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Cost:
    """The cost that exchanges of these bytes took, by least squares; neither part is below 0.

    >>> fit([1, 2, 3], [3.0, 5.0, 7.0])
    Cost(latency=1.0, a_byte=2.0)
    """
    # fsum: rounded once, so that the order of what was measured is nothing, even where the line is almost level
    count, total, bytes_moved = len(sizes), fsum(seconds), fsum(sizes)
    middle, mean = bytes_moved / count, total / count
    spread = fsum((size - middle) ** 2 for size in sizes)
    rising = fsum((size - middle) * took for size, took in zip(sizes, seconds, strict=True))
    slope = rising / spread if spread else 0.0
    if slope <= 0 or mean - slope * middle < 0:  # too few sizes to tell, or noise: all is the bytes'
        return Cost(0.0, total / bytes_moved) if bytes_moved else Cost(mean, 0.0)
    return Cost(mean - slope * middle, slope)
