"""Small convolutional network for grey images of 8 x 8.

    1 x 8 x 8 ─ 3x3 ─ 32 x 8 x 8 ─ 3x3 ─ 64 x 8 x 8 ─ pool ─ 64 x 4 x 4 ─ 3x3 ─ 128 x 4 x 4 ─ pool ─ 512 ─ 128 ─ classes

It has 159,626 parameters for 10 classes.
"""

from __future__ import annotations

from torch import nn

from unisono.models.convnet import Convnet


class SmallConvnet(Convnet):
    """Network from images of shape (samples, channels, 8, 8) to scores of shape (samples, classes)."""

    def __init__(self, classes: int, channels: int = 1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, classes))
