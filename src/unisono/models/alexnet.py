"""AlexNet in Caffe's form (Krizhevsky et al. 2012): convolutions in two groups, local response normalisation, dropout.

    11x11/4, 96 ─ pool ─ 5x5, 256 ─ pool ─ 3x3, 384 ─ 3x3, 384 ─ 3x3, 256 ─ pool ─ 4,096 ─ 4,096 ─ classes

A relu follows each layer but the last; the second, fourth and fifth convolution are in two groups. For 1,000 classes
and 3 channels it has 60,965,224 parameters, as in Theano-MPI's table 2, and an image takes 0.72 billion multiply-adds,
0.67 in convolutions.
"""

from __future__ import annotations

import torch
from torch import nn


class AlexNet(nn.Module):
    """Network from images of shape (samples, channels, 224, 224) to scores of shape (samples, classes)."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 96, 11, 4, 2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(96, 256, 5, padding=2, groups=2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(256, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 384, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores before the softmax."""
        scores: torch.Tensor = self.classifier(self.features(images))
        return scores
