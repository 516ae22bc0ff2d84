"""Test accuracy of a network: its first guess is right (top-1), or one of its first five (top-5).

    scores (0.1, 0.7, 0.2, 0, 0, 0)    label 2    wrong at first, right among five

Top-5 is the measure of Theano-MPI's tables, top-1 that of DIMD's figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BEST = 5
"""Number of guesses in top-5."""


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 accuracy: shares of samples, 0 to 1, whose label is the first guess, or among the first five."""

    top1: float
    top5: float | None
    """Share for top-5; None with five classes or fewer, where no guess could miss."""


def guesses(scores: torch.Tensor) -> torch.Tensor:
    """Return the best guesses of each sample, best first: int64, (samples, BEST), or all classes if there are fewer."""
    return scores.topk(min(BEST, scores.shape[1])).indices


def count(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return int64 counts of shape (3,), to be summed over batches and ranks.

    They are: samples right at the first guess, samples right among the first five, and samples for which the latter
    could have been wrong. `scores` is (samples, classes), `labels` is (samples,).
    """
    samples, classes = scores.shape
    hits = guesses(scores) == labels[:, None]
    return torch.stack((hits[:, 0].sum(), hits.sum(), torch.tensor(samples if classes > BEST else 0)))


def accuracy_of(counts: torch.Tensor, samples: int) -> Accuracy:
    """Return the accuracy on `samples` samples from the summed counts."""
    first, five, open_to_error = counts.tolist()
    return Accuracy(first / samples, five / samples if open_to_error else None)
