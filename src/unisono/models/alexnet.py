"""AlexNet in Caffe's form (Krizhevsky et al. 2012): convolutions in two groups, local response normalisation, dropout.

    11x11/4, 96 ─ pool ─ 5x5, 256 ─ pool ─ 3x3, 384 ─ 3x3, 384 ─ 3x3, 256 ─ pool ─ 4,096 ─ 4,096 ─ classes

A relu follows each layer but the last; the second, fourth and fifth convolution are in two groups. For 1,000 classes
and 3 channels it has 60,965,224 parameters, as in Theano-MPI's table 2, and an image takes 0.72 billion multiply-adds,
0.67 in convolutions.

In swCaffe's form (section 6.1) each convolution and the two wide layers have batch norm in place of local response
normalisation, and there is no dropout.
"""

from __future__ import annotations

import torch
from torch import nn

from unisono.models.convnet import Convnet, wide_classifier


class AlexNet(Convnet):
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
        self.classifier = wide_classifier(256 * 6 * 6, 4096, 4096, classes)


class _Norm(nn.BatchNorm1d):
    """Batch norm that uses its running statistics where a rank's share is a single sample, which has no variance."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, features) to the same shape."""
        if len(inputs) > 1:
            return super().forward(inputs)
        return nn.functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def _convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1
) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class AlexNetBN(Convnet):
    """Network from images of shape (samples, channels, 224, 224) to scores of shape (samples, classes)."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(channels, 96, 11, 4, 2),
            nn.MaxPool2d(3, 2),
            _convolution(96, 256, 5, padding=2, groups=2),
            nn.MaxPool2d(3, 2),
            _convolution(256, 384, 3, padding=1),
            _convolution(384, 384, 3, padding=1, groups=2),
            _convolution(384, 256, 3, padding=1, groups=2),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(256 * 6 * 6, 4096, bias=False),
            _Norm(4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, 4096, bias=False),
            _Norm(4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, classes),
        )
