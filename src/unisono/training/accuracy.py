"""Loss in training, and accuracy in tests: the first guess is right (top-1), or one of the first five (top-5).

    scores (0.1, 0.7, 0.2, 0, 0, 0)    label 2    wrong at first, right among five, cross entropy 1.79

Top-5 is the measure of Theano-MPI's tables, top-1 that of DIMD's figures, and that of text its perplexity, which is the
exponential of the mean cross entropy of its tokens. In training, networks may have auxiliary classifiers, which give
their lower part gradients of its own:

    scores                             cross entropy
    scores, auxiliary, auxiliary       cross entropy + 0.3 (cross entropy + cross entropy)      (GoogLeNet)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import exp, inf
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unisono.device import host_memory, streams_of

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


class LossSum:
    """Sum of the losses of steps, in float64. That of a step on a device is copied to the host behind the step, and
    read a step later: nobody waits for it."""

    def __init__(self, before: float = 0.0) -> None:
        self._sum, self._late = before, deque[tuple[torch.Tensor, Any, int]]()
        self._memory: list[torch.Tensor] = []
        self.last: float | None = None
        """Mean loss of the newest step that has been read; None where it had no samples."""

    def add(self, loss: float | torch.Tensor, samples: int) -> None:
        """Add the loss of a step, the sum over its samples: a number, or a tensor of one on a device."""
        if not isinstance(loss, torch.Tensor):
            self._add(loss, samples)
            return
        self._memory = self._memory or [host_memory(1, loss.dtype, loss.device) for _ in range(2)]
        self._memory.reverse()
        self._memory[0].copy_(loss, non_blocking=True)
        self._late.append((self._memory[0], streams_of(loss.device).record(), samples))
        if len(self._late) > 1:
            self._read()

    @property
    def total(self) -> float:
        """Sum of all losses; waits for those of a device."""
        while self._late:
            self._read()
        return self._sum

    def _read(self) -> None:
        memory, copied, samples = self._late.popleft()
        copied.synchronize()
        self._add(float(memory), samples)

    def _add(self, loss: float, samples: int) -> None:
        self._sum, self.last = self._sum + loss, loss / samples if samples else None


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
    counts = hits[:, 0].sum(), hits.sum(), loss.new_tensor(samples if classes > BEST else 0), loss
    return torch.stack([each.to(torch.float64) for each in counts])


def accuracy_of(counts: torch.Tensor, labels: int) -> Accuracy:
    first, five, open_to_error, loss = counts.tolist()
    return Accuracy(first / labels, five / labels if open_to_error else None, loss / labels)


AUXILIARY = 0.3
"""Weight of each auxiliary classifier's loss; the network's own has weight 1 (Szegedy et al. 2015, section 5)."""


def classification_loss(scores: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `scores`, (samples, classes), and int64 `labels`, (samples,).

    For texts, `scores` are (samples, tokens, vocabulary) and `labels` (samples, tokens). With several scores, the first
    are the network's own, and the others are those of its auxiliary classifiers.
    """
    several = (scores,) if isinstance(scores, torch.Tensor) else scores
    loss, *auxiliary = (cross_entropy(each.flatten(0, -2), labels.flatten()) for each in several)
    return loss + AUXILIARY * sum(auxiliary) if auxiliary else loss


def loss_of_none(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return a loss of 0 for an empty batch, whose passes join the exchanges of split layers. Batch norms, which take
    no empty batch, keep their statistics."""
    norms = [norm for norm in model.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.training]
    for norm in norms:
        norm.eval()
    scores = model(inputs)
    for norm in norms:
        norm.train()
    return torch.stack([output.sum() for output in ((scores,) if isinstance(scores, torch.Tensor) else scores)]).sum()


def blank_labels(scores: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return labels 0 for the loss of `scores`, for a step whose result is not used."""
    first = scores if isinstance(scores, torch.Tensor) else scores[0]
    return torch.zeros(first.shape[:-1], dtype=torch.int64, device=first.device)
