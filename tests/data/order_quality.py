"""Quality of an order of samples, as numbers to compare with those of true random permutations.

class runs      share of neighbours in the order with the same class: high if classes stay together
neighbours      share of neighbours in the order that were neighbours before: high if stretches stay together
distance        mean distance that samples moved, over their number: a third for a true permutation

Between two epochs, for 4 ranks that see each sample once in both:

    same rank       share of samples that the same rank sees again: 1/4 for a true permutation, 1 if nothing moves
    seen by a rank  share of all samples that a rank has seen after some epochs: 1 - (3/4)^k after k permutations
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import ShuffleOptions, epoch_order, ranks_of

Order = NDArray[np.int64]

PERMUTATIONS = 20
"""Number of true random permutations that are measured, for mean and standard deviation."""


class Quality(NamedTuple):
    """Quality of an order of samples, whose numbers are their positions before the shuffle."""

    class_runs: float
    neighbours: float
    distance: float


class QualityComparison(NamedTuple):
    """Quality of an order, with mean and standard deviation for true random permutations of the same samples."""

    measured: Quality
    mean: Quality
    std: Quality

    @property
    def max_z_score(self) -> float:
        """Largest distance of the three numbers from the mean of true permutations, in standard deviations."""
        return max(
            abs(measured - mean) / max(std, 1e-12)
            for measured, mean, std in zip(self.measured, self.mean, self.std, strict=True)
        )


def quality(order: Order, labels: NDArray[np.integer]) -> Quality:
    """Return the quality of an order in which sample i was at position i before; `labels` has each sample's label."""
    if len(order) < 2:
        return Quality(0.0, 0.0, 0.0)
    classes = labels[order]
    runs = float(np.mean(classes[1:] == classes[:-1]))
    kept = float(np.mean(np.abs(np.diff(order)) == 1))
    moved = float(np.mean(np.abs(order - np.arange(len(order)))) / len(order))
    return Quality(runs, kept, moved)


def shuffle_shares(order: Order, batch: int, ranks: int, seed: int = 0) -> Order:
    """Return the order with the samples that a rank sees in a step in random order: among them, it plays no part.

    So neighbours are samples of one rank in one step, however a storage lays them out. A permutation stays as random.
    """
    position = np.arange(len(order))
    share = position // batch * ranks + ranks_of(len(order), batch, ranks)
    return order[np.lexsort((np.random.default_rng(seed).random(len(order)), share))]


def compare_with_permutations(order: Order, labels: NDArray[np.integer], seed: int = 0) -> QualityComparison:
    """Return the quality of an order, compared with `PERMUTATIONS` true random permutations."""
    rng = np.random.default_rng(seed)
    true = np.array([quality(rng.permutation(len(order)), labels) for _ in range(PERMUTATIONS)])
    return QualityComparison(quality(order, labels), Quality(*true.mean(axis=0)), Quality(*true.std(axis=0, ddof=1)))


class Mixing(NamedTuple):
    """Samples that ranks see again, over several epochs."""

    same_rank: float
    """Share of samples that the same rank sees again in the next epoch, the mean of all pairs of epochs."""
    seen: float
    """Share of all samples that a rank has seen in all epochs together, the mean of all ranks."""


def order_from_last(samples: int, batch: int, seed: int, epoch: int, shuffle: ShuffleOptions) -> Order:
    """Return an epoch's order in which samples are numbered by their positions in the epoch before.

    The first epoch follows the order of the pack.
    """
    order = epoch_order(samples, batch, seed, epoch, shuffle)
    if epoch == 0:
        return order
    position = np.empty_like(order)
    position[epoch_order(samples, batch, seed, epoch - 1, shuffle)] = np.arange(samples)
    return position[order]


def mixing(samples: int, batch: int, seed: int, epochs: int, shuffle: ShuffleOptions, ranks: int) -> Mixing:
    """Return how much `ranks` ranks see again in the first `epochs` epochs, 2 or more, with this shuffle."""
    at_position, seen = ranks_of(samples, batch, ranks), np.zeros((ranks, samples), bool)
    rank_of_sample, before, same = np.empty(samples, np.int32), np.empty(samples, np.int32), list[float]()
    for epoch in range(epochs):
        rank_of_sample[epoch_order(samples, batch, seed, epoch, shuffle)] = at_position
        if epoch:
            same.append(float(np.mean(rank_of_sample == before)))
        seen[rank_of_sample, np.arange(samples)] = True
        before[:] = rank_of_sample
    return Mixing(float(np.mean(same)), float(seen.mean()))
