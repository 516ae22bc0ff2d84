"""CD-DNN, a network for speech (PCL-DNN 5.4, Seide et al. 2011): seven hidden layers over frames with their context.

    a window: frame -c ... frame 0 ... frame +c ─ 2,048 ─ 2,048 ─ ... seven of them ... ─ 2,048 ─ classes

    a recording    window 0   log p(class | window 0) ─┐
                   window 1   log p(class | window 1) ─┼─ mean ─ its scores
                   window 2   log p(class | window 2) ─┘

A relu follows each hidden layer. Each window has its posterior, the softmax. A recording's scores are the mean of the
log posteriors over its windows: the product of the posteriors, as if windows were independent, and the root of that.
The cross entropy makes it a distribution again; for a single window it is the posterior itself.

For 440 inputs (11 frames of 40 numbers) and 10 classes it has 26,101,770 parameters, and a window takes 26.1 million
multiply-adds.
"""

from __future__ import annotations

import torch
from torch import nn

HIDDEN, WIDTH = 7, 2048


class CDDNN(nn.Module):
    """Network from windows, (samples, windows, inputs) or (samples, inputs), to scores of shape (samples, classes)."""

    def __init__(self, classes: int, inputs: int = 440) -> None:
        super().__init__()
        layers, features = list[nn.Module](), inputs
        for _ in range(HIDDEN):
            layers += [nn.Linear(features, WIDTH), nn.ReLU(inplace=True)]
            features = WIDTH
        self.layers = nn.Sequential(*layers, nn.Linear(features, classes))
        for module in self.layers:
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the log posteriors of the windows, as their mean over the windows of each sample."""
        scores: torch.Tensor = self.layers(windows)
        exact = torch.promote_types(scores.dtype, torch.float32)  # rounded to 16 bits, the mean would lose digits
        posteriors = torch.log_softmax(scores, dim=-1, dtype=exact)
        return posteriors.mean(dim=1) if windows.ndim == 3 else posteriors
