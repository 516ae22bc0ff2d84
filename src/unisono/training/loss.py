"""What training makes small: the cross entropy, of auxiliary classifiers too.

    scores                             cross entropy
    scores, auxiliary, auxiliary       cross entropy + 0.3 (cross entropy + cross entropy)      (GoogLeNet)

The auxiliary ones give the lower part of a network gradients of their own; they are not asked in a test.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

AUXILIARY = 0.3
"""The weight of each auxiliary classifier beside the network's own (Szegedy et al. 2015, section 5)."""


def classification_loss(scores: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """The mean over the samples of the cross entropy of `scores`, (samples, classes), and `labels`, (samples,), int64.

    Of several scores the first are the network's own, and the others those of its auxiliary classifiers.
    """
    if isinstance(scores, torch.Tensor):
        return cross_entropy(scores, labels)
    own, *auxiliary = (cross_entropy(each, labels) for each in scores)
    return own + AUXILIARY * sum(auxiliary)
