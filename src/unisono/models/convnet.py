"""Parts that several networks for images share."""

from __future__ import annotations

import torch
from torch import nn


class Convnet(nn.Module):
    """Network from images of shape (samples, channels, height, width) to scores of shape (samples, classes)."""

    features: nn.Sequential
    classifier: nn.Sequential

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores before the softmax."""
        scores: torch.Tensor = self.classifier(self.features(images))
        return scores


def wide_classifier(inputs: int, first: int, second: int, classes: int) -> nn.Sequential:
    """Return two hidden layers of these widths with relu and dropout, and a layer of `classes` scores."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, first),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(first, second),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(second, classes),
    )
