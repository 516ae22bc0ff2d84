"""How much of what is held out a network gets right: its first guess (top-1), and one among its first five (top-5).

    scores (0.1, 0.7, 0.2, 0, 0, 0)    label 2    wrong at first, right among five

Top-5 is the measure of Theano-MPI's tables, top-1 that of DIMD's figures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BEST = 5
"""Guesses of top-5."""


@dataclass(frozen=True)
class Accuracy:
    """The shares of samples, 0 to 1, whose label is the first guess, and one of the first five."""

    top1: float
    top5: float | None
    """None where there are five classes or fewer, so that no guess could miss."""


def count(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of `scores`, (samples, classes), and `labels`, (samples,): how many are right at first, how many among the first
    five, and of how many the latter could have been wrong; int64, shape (3,), to be summed over batches and ranks.
    """
    samples, classes = scores.shape
    hits = scores.topk(min(BEST, classes)).indices == labels[:, None]
    return torch.stack((hits[:, 0].sum(), hits.sum(), torch.tensor(samples if classes > BEST else 0)))


def accuracy_of(counts: torch.Tensor, samples: int) -> Accuracy:
    """What the sum of all counts says of `samples` samples."""
    first, five, open_to_error = counts.tolist()
    return Accuracy(first / samples, five / samples if open_to_error else None)
