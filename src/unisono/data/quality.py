"""Quality of a shuffle, as numbers to compare with those of true random permutations.

class runs      neighbours in the order that have one class, as a share: high where classes stay together
neighbours      neighbours in the order that were neighbours before it, as a share: high where stretches stay whole
distance        how far samples moved, over how many there are: a third for a true permutation
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]

PERMUTATIONS = 20
"""Number of true random permutations that are measured, for mean and standard deviation."""


class Quality(NamedTuple):
    """Quality of an order of samples whose numbers are their places before the shuffle."""

    class_runs: float
    neighbours: float
    distance: float


class Beside(NamedTuple):
    """Quality of an order, with mean and standard deviation for true random permutations of the same samples."""

    found: Quality
    mean: Quality
    deviation: Quality

    @property
    def off(self) -> float:
        """Largest distance of the three numbers from the mean of true permutations, in standard deviations."""
        return max(
            abs(found - mean) / max(deviation, 1e-12)
            for found, mean, deviation in zip(self.found, self.mean, self.deviation, strict=True)
        )


def quality(order: Order, labels: NDArray[np.integer]) -> Quality:
    """Return the quality of an order in which sample i was at place i before; `labels` has the label of each sample."""
    if len(order) < 2:
        return Quality(0.0, 0.0, 0.0)
    classes = labels[order]
    runs = float(np.mean(classes[1:] == classes[:-1]))
    kept = float(np.mean(np.abs(np.diff(order)) == 1))
    moved = float(np.mean(np.abs(order - np.arange(len(order)))) / len(order))
    return Quality(runs, kept, moved)


def beside_permutations(order: Order, labels: NDArray[np.integer], seed: int = 0) -> Beside:
    """Return the quality of an order beside that of `PERMUTATIONS` true random permutations."""
    dice = np.random.default_rng(seed)
    true = np.array([quality(dice.permutation(len(order)), labels) for _ in range(PERMUTATIONS)])
    return Beside(quality(order, labels), Quality(*true.mean(axis=0)), Quality(*true.std(axis=0, ddof=1)))
