"""Residual networks (He et al. 2016): for small images 6 n + 2 layers (section 4.2), for large ones ResNet-50.

    block   x ─ 3x3 ─ norm ─ relu ─ 3x3 ─ norm ─ (+) ─ relu        where sizes change, every second pixel of x is
            └──────────────────────────────────┘                  used, and channels of zeros are added: no parameters

n = 1, 3, 5, 7, 9 and 18 give ResNet-8, 20, 32, 44, 56 and 110. ResNet-20 has 269,722 parameters for 10 classes and 3
channels.

ResNet-50 has the stride in the 3x3 convolution of a block, as in PyTorch:

    block of w   x ─ 1x1, w ─ norm, relu ─ 3x3, w ─ norm, relu ─ 1x1, 4 w ─ norm ─ (+) ─ relu
                 └── (1x1, 4 w ─ norm, where sizes change) ─────────────────────┘

It has 25,557,032 parameters for 1,000 classes and 3 channels. The last norm of each block begins at 0, so the network
begins as its shortcuts alone. The classifier's weights begin with a standard deviation of 0.01 (Goyal et al. 2017,
section 5.1): rates that are too high for the first steps do less harm.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn, relu_
from torch.nn.functional import pad

WIDTHS = (16, 32, 64)


class BasicBlock(nn.Module):
    """Block of two convolutions beside a shortcut."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self._more = width - in_channels
        self.convolution1 = nn.Conv2d(in_channels, width, 3, 1 if width == in_channels else 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, in_channels, h, w) to (samples, width, h or h / 2, w or w / 2)."""
        short = inputs
        if self._more:
            short = pad(inputs[:, :, ::2, ::2], (0, 0, 0, 0, self._more // 2, self._more - self._more // 2))
        inner = relu_(self.norm1(self.convolution1(inputs)))
        return relu_(self.norm2(self.convolution2(inner)).add_(short))


class ResNet(nn.Module):
    """Network from images of shape (samples, channels, height, width) to scores of shape (samples, classes)."""

    def __init__(self, first: nn.Module, pool: nn.Module, blocks: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.first, self.pool, self.blocks, self.classifier = first, pool, blocks, classifier
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores before the softmax."""
        features: torch.Tensor = self.blocks(self.pool(relu_(self.first(images))))
        scores: torch.Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores


def resnet_cifar(layers: int, classes: int, channels: int = 3) -> ResNet:
    """Return the network of 6 n + 2 layers for images of about 32 x 32: ResNet-20 for 20, and so on."""
    blocks, more = divmod(layers - 2, 6)
    assert not more, f"{layers} layers are not 6 n + 2"
    first = nn.Sequential(nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]))
    in_channels, stages = WIDTHS[0], list[nn.Module]()
    for width in WIDTHS:
        stages += [BasicBlock(in_channels if block == 0 else width, width) for block in range(blocks)]
        in_channels = width
    return ResNet(first, nn.Identity(), nn.Sequential(*stages), nn.Linear(in_channels, classes))


resnet8, resnet20, resnet32, resnet44, resnet50_cifar, resnet56, resnet110 = (
    partial(resnet_cifar, layers) for layers in (8, 20, 32, 44, 50, 56, 110)
)


STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


class Bottleneck(nn.Module):
    """Block of three convolutions beside a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = EXPANSION * width
        self.convolution1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.convolution2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.convolution3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.short: nn.Module = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.short = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, in_channels, h, w) to (samples, 4 width, h / stride, w / stride)."""
        inner = relu_(self.norm1(self.convolution1(inputs)))
        inner = relu_(self.norm2(self.convolution2(inner)))
        return relu_(self.norm3(self.convolution3(inner)).add_(self.short(inputs)))


def resnet50(classes: int, channels: int = 3) -> ResNet:
    """Return the network of 50 layers for images of about 224 x 224."""
    first = nn.Sequential(nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64))
    in_channels, stages = 64, list[nn.Module]()
    for width, blocks in STAGES:
        for block in range(blocks):
            stages.append(Bottleneck(in_channels, width, 2 if block == 0 and width != STAGES[0][0] else 1))
            in_channels = EXPANSION * width
    classifier = nn.Linear(in_channels, classes)
    network = ResNet(first, nn.MaxPool2d(3, 2, 1), nn.Sequential(*stages), classifier)
    nn.init.normal_(classifier.weight, std=0.01)
    return network
