"""Inception with batch norm (Ioffe and Szegedy 2015, figure 5), in MXNet's form: a network that MXNET-MPI measures.

    7x7/2, 64 ─ pool ─ 1x1, 64 ─ 3x3, 192 ─ pool ─ 3a 3b 3c(half) ─ 4a 4b 4c 4d 4e(half) ─ 5a 5b ─ mean ─ classes

    a module    x ─┬─ 1x1 ────────────────────┬─ side by side        one that halves the size has no 1x1, strides of 2
                   ├─ 1x1 ─ 3x3 ──────────────┤                      in the last 3x3, and a pool without a convolution
                   ├─ 1x1 ─ 3x3 ─ 3x3 ────────┤
                   └─ 3x3 pool ─ 1x1 ─────────┘

The pool projections of MXNet's 4c and 4d have 128 channels, where the paper has 96. For 1,000 classes and 3 channels
the network has 11,285,224 parameters (11,295,240 where convolutions have biases, which batch norm cancels), and an
image takes 2.03 billion multiply-adds.
"""

from __future__ import annotations

import torch
from torch import nn

from unisono.models.googlenet import convolution

MODULES: tuple[tuple[int, int, int, int, int, int, str, int], ...] = (
    (192, 64, 64, 64, 64, 96, "mean", 32),
    (256, 64, 64, 96, 64, 96, "mean", 64),
    (320, 0, 128, 160, 64, 96, "half", 0),
    (576, 224, 64, 96, 96, 128, "mean", 128),
    (576, 192, 96, 128, 96, 128, "mean", 128),
    (576, 160, 128, 160, 128, 160, "mean", 128),
    (608, 96, 128, 192, 160, 192, "mean", 128),
    (608, 0, 128, 192, 192, 256, "half", 0),
    (1056, 352, 192, 320, 160, 224, "mean", 128),
    (1024, 352, 192, 320, 192, 224, "max", 128),
)
"""Channels: in, 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3; the pool, pool projection."""


class InceptionModule(nn.Module):
    """Inception module: three or four branches side by side."""

    def __init__(
        self,
        in_channels: int,
        one: int,
        reduce_three: int,
        three: int,
        reduce_double: int,
        double: int,
        pool: str,
        out_channels: int,
    ) -> None:
        super().__init__()
        stride = 2 if pool == "half" else 1
        branches: list[nn.Module] = [convolution(in_channels, one, 1, norm=True)] if one else []
        branches.append(
            nn.Sequential(
                convolution(in_channels, reduce_three, 1, norm=True),
                convolution(reduce_three, three, 3, stride, norm=True),
            )
        )
        branches.append(
            nn.Sequential(
                convolution(in_channels, reduce_double, 1, norm=True),
                convolution(reduce_double, double, 3, norm=True),
                convolution(double, double, 3, stride, norm=True),
            )
        )
        pooling = nn.AvgPool2d(3, 1, 1) if pool == "mean" else nn.MaxPool2d(3, stride, 1)
        branches.append(
            nn.Sequential(pooling, convolution(in_channels, out_channels, 1, norm=True)) if out_channels else pooling
        )
        self.ways = nn.ModuleList(branches)  # a name in checkpoints

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, channels in, h, w) to (samples, channels of all branches, h / stride, w / stride)."""
        return torch.cat([branch(inputs) for branch in self.ways], dim=1)


class InceptionBN(nn.Module):
    """Network from images of shape (samples, channels, 224, 224) to scores of shape (samples, classes)."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(
            convolution(channels, 64, 7, 2, norm=True),
            nn.MaxPool2d(3, 2, 1),
            convolution(64, 64, 1, norm=True),
            convolution(64, 192, 3, norm=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.inception = nn.Sequential(*(InceptionModule(*sizes) for sizes in MODULES))
        self.classifier = nn.Linear(1024, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores before the softmax."""
        features: torch.Tensor = self.inception(self.first(images))
        scores: torch.Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores
