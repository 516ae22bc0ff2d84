"""The loss in training: cross entropy, with auxiliary classifiers.

    scores                             cross entropy
    scores, auxiliary, auxiliary       cross entropy + 0.3 (cross entropy + cross entropy)      (GoogLeNet)

The auxiliary classifiers give the lower part of a network gradients of their own; tests do not use them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

AUXILIARY = 0.3
"""Weight of each auxiliary classifier's loss; the network's own has weight 1 (Szegedy et al. 2015, section 5)."""


def classification_loss(scores: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of `scores`, (samples, classes), and int64 `labels`, (samples,).

    For texts, `scores` are (samples, tokens, vocabulary) and `labels` (samples, tokens). With several scores, the first
    are the network's own, and the others are those of its auxiliary classifiers.
    """
    if isinstance(scores, torch.Tensor):
        return cross_entropy(scores.flatten(0, -2), labels.flatten())
    own, *auxiliary = (cross_entropy(each, labels) for each in scores)
    return own + AUXILIARY * sum(auxiliary)


def loss_of_none(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return a loss of 0 for an empty batch, whose passes join the exchanges of split layers.

    Batch norms, which take no empty batch, keep their statistics.
    """
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm) and one.training]
    for norm in norms:
        norm.eval()
    scores = model(inputs)
    for norm in norms:
        norm.train()
    return torch.stack([one.sum() for one in ((scores,) if isinstance(scores, torch.Tensor) else scores)]).sum()


def blank_labels(scores: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return labels 0 for the loss of `scores`, for a step whose result is not used."""
    own = scores if isinstance(scores, torch.Tensor) else scores[0]
    return torch.zeros(own.shape[:-1], dtype=torch.int64)
