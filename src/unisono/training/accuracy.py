"""Test accuracy of a network: its first guess is right (top-1), or one of its first five (top-5); and its test loss.

    scores (0.1, 0.7, 0.2, 0, 0, 0)    label 2    wrong at first, right among five, cross entropy 1.79

Top-5 is the measure of Theano-MPI's tables, top-1 that of DIMD's figures, and that of text its perplexity, which is the
exponential of the mean cross entropy of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

import torch
from torch.nn.functional import cross_entropy

BEST = 5
"""Number of guesses in top-5."""


@dataclass(frozen=True)
class Accuracy:
    """Top-1 and top-5 accuracy: shares of labels, 0 to 1, that are the first guess, or among the first five."""

    top1: float
    top5: float | None
    """Share for top-5; None with five classes or fewer, where no guess could miss."""
    loss: float
    """Mean cross entropy of the labels."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss, infinite where that is too large."""
        return exp(self.loss) if self.loss < 700 else inf


def guesses(scores: torch.Tensor) -> torch.Tensor:
    """Return the best guesses of each sample, best first: int64, (samples, BEST), or all classes if there are fewer."""
    return scores.topk(min(BEST, scores.shape[1])).indices


def count(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return float64 counts of shape (4,), to be summed over batches and ranks.

    They are: labels right at the first guess, labels right among the first five, labels for which the latter could have
    been wrong, and the sum of their cross entropy. `scores` is (samples, classes), `labels` is (samples,); for texts
    (samples, tokens, vocabulary) and (samples, tokens).
    """
    scores, labels = scores.flatten(0, -2), labels.flatten()
    samples, classes = scores.shape
    hits = guesses(scores) == labels[:, None]
    exact = torch.promote_types(scores.dtype, torch.float32)  # 16 bits would round the loss
    loss = cross_entropy(scores.to(exact), labels, reduction="sum")
    counts = hits[:, 0].sum(), hits.sum(), torch.tensor(samples if classes > BEST else 0), loss
    return torch.stack([each.to(torch.float64) for each in counts])


def accuracy_of(counts: torch.Tensor, labels: int) -> Accuracy:
    """Return the accuracy on `labels` labels from the summed counts."""
    first, five, open_to_error, loss = counts.tolist()
    return Accuracy(first / labels, five / labels if open_to_error else None, loss / labels)
