"""OverFeat's fast network (Sermanet et al. 2014, table 1), which PCL-DNN measures.

    11x11/4, 96 ─ pool ─ 5x5, 256 ─ pool ─ 3x3, 512 ─ 3x3, 1,024 ─ 3x3, 1,024 ─ pool ─ 3,072 ─ 4,096 ─ classes
    231           56     28         24     12       12           12           12     6

A relu follows each layer but the last; the second row is the size there. For 1,000 classes and 3 channels it has
145,920,872 parameters, and an image takes 2.80 billion multiply-adds.
"""

from __future__ import annotations

from torch import nn

from unisono.models.convnet import Convnet, wide_classifier


class OverFeatFast(Convnet):
    """Network from images of shape (samples, channels, 231, 231) to scores of shape (samples, classes)."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 96, 11, 4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(96, 256, 5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(256, 512, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(512, 1024, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(1024, 1024, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = wide_classifier(1024 * 6 * 6, 3072, 4096, classes)
