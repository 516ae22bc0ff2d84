"""Networks of Inception modules: branches of convolutions side by side.

GoogLeNet (Szegedy et al. 2015, table 1) in Caffe's form has two auxiliary classifiers, behind 4a and 4d, or batch norm:

    a module    x ─┬─ 1x1 ─────────────┬─ side by side
                   ├─ 1x1 ─ 3x3 ───────┤
                   ├─ 1x1 ─ 5x5 ───────┤
                   └─ 3x3 pool ─ 1x1 ──┘

For 1,000 classes and 3 channels it has 13,378,280 parameters, as in Theano-MPI's table 2; 6,379,728 of them are in the
auxiliary classifiers. An image takes 1.58 billion multiply-adds without those. In training it returns three scores; the
loss is that of the network plus 0.3 of each auxiliary one (`training/accuracy.py`).

With batch norm after each convolution there is neither local response normalisation nor an auxiliary classifier:
7,005,832 parameters.

The GoogLeNetBN that DIMD measures is that of IBM's fork of Torch's examples for ImageNet, which has the paper's
data-parallel table, too (ibmsoe/imagenet-multiGPU.torch, 2016): 19,147,888 parameters, 76.6 MB in float32, with biases
before the batch norm, which begin at 0 here. (Torch's modules have a second relu between the two.) The paper's payload
is 93 MB, and it does not say of what. The network has the next one's modules, halves the size by convolutions, and has
one auxiliary classifier; an image takes 2.76 billion multiply-adds without it.

Inception with batch norm (Ioffe and Szegedy 2015, figure 5) in MXNet's form, a network that MXNET-MPI measures:

    a module    x ─┬─ 1x1 ────────────────────┬─ side by side        one that halves the size has no 1x1, strides of 2
                   ├─ 1x1 ─ 3x3 ──────────────┤                      in the last 3x3, and a pool without a convolution
                   ├─ 1x1 ─ 3x3 ─ 3x3 ────────┤
                   └─ 3x3 pool ─ 1x1 ─────────┘

The pool projections of MXNet's 4c and 4d have 128 channels, where the paper has 96. For 1,000 classes and 3 channels
the network has 11,285,224 parameters (11,295,240 where convolutions have biases, which batch norm cancels), and an
image takes 2.03 billion multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

GOOGLENET_MODULES = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}
"""Channels: in, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection."""


def convolution(in_channels: int, out_channels: int, kernel: int, stride: int = 1, norm: bool = False) -> nn.Sequential:
    """Return a convolution that keeps the size, or divides it by the stride, with batch norm or a bias, and relu."""
    padding = (kernel - 1) // 2  # one of 2 x 2 only divides
    layers: list[nn.Module] = [nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=not norm)]
    return nn.Sequential(*layers, *([nn.BatchNorm2d(out_channels)] if norm else []), nn.ReLU(inplace=True))


def branch(channels: Sequence[int], kernels: Sequence[int], stride: int = 1, norm: bool = True) -> nn.Sequential:
    """Return convolutions one after the other, from channels[i] to channels[i + 1]; the last one has the stride."""
    last = len(kernels) - 1
    return nn.Sequential(
        *(
            convolution(channels[place], channels[place + 1], kernel, stride if place == last else 1, norm)
            for place, kernel in enumerate(kernels)
        )
    )


def _pool() -> nn.Module:
    """Return a pool that halves the size, rounded up."""
    return nn.MaxPool2d(3, 2, ceil_mode=True)


class Inception(nn.Module):
    """Inception module: four branches side by side."""

    def __init__(self, sizes: tuple[int, ...], norm: bool) -> None:
        super().__init__()
        in_channels, one, reduce_three, three, reduce_five, five, pool = sizes
        self.one = convolution(in_channels, one, 1, norm=norm)
        self.three = branch((in_channels, reduce_three, three), (1, 3), norm=norm)
        self.five = branch((in_channels, reduce_five, five), (1, 5), norm=norm)
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(in_channels, pool, 1, norm=norm))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, channels in, h, w) to (samples, channels of all branches, h, w)."""
        return torch.cat([self.one(inputs), self.three(inputs), self.five(inputs), self.pool(inputs)], dim=1)


class Auxiliary(nn.Module):
    """Classifier in the middle of the network that gives its lower part gradients of its own in training."""

    def __init__(self, in_channels: int, classes: int, width: int = 1024, norm: bool = False) -> None:
        """With `norm` there is batch norm, and no dropout."""
        super().__init__()
        self.layers = nn.Sequential(
            nn.AvgPool2d(5, 3),
            convolution(in_channels, 128, 1, norm=norm),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, width),
            nn.ReLU(inplace=True),
            nn.Identity() if norm else nn.Dropout(0.7),
            nn.Linear(width, classes),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map (samples, channels, 14, 14) to scores of shape (samples, classes)."""
        scores: torch.Tensor = self.layers(inputs)
        return scores


class GoogLeNet(nn.Module):
    """Network from images of shape (samples, channels, 224, 224) to scores of shape (samples, classes).

    In training, without batch norm, it returns three scores: its own and those of the auxiliary classifiers.
    """

    def __init__(self, classes: int, channels: int = 3, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            convolution(channels, 64, 7, 2, norm),
            _pool(),
            nn.Identity() if norm else nn.LocalResponseNorm(5),
            convolution(64, 64, 1, norm=norm),
            convolution(64, 192, 3, norm=norm),
            nn.Identity() if norm else nn.LocalResponseNorm(5),
            _pool(),
        )
        parts = {name: Inception(sizes, norm) for name, sizes in GOOGLENET_MODULES.items()}
        self.third = nn.Sequential(parts["3a"], parts["3b"], _pool(), parts["4a"])
        self.fourth = nn.Sequential(parts["4b"], parts["4c"], parts["4d"])
        self.fifth = nn.Sequential(parts["4e"], _pool(), parts["5a"], parts["5b"])
        self.classifier = nn.Sequential(nn.Dropout(0.4), nn.Linear(1024, classes))
        self.auxiliaries = nn.ModuleList([] if norm else [Auxiliary(512, classes), Auxiliary(528, classes)])
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the scores before the softmax; in training, without batch norm, a tuple with the auxiliary ones."""
        third = self.third(self.first(images))
        fourth = self.fourth(third)
        scores: torch.Tensor = self.classifier(self.fifth(fourth).mean(dim=(2, 3)))
        if not (self.training and len(self.auxiliaries)):
            return scores
        return scores, self.auxiliaries[0](third), self.auxiliaries[1](fourth)


googlenet_bn = partial(GoogLeNet, norm=True)
"""GoogLeNet with batch norm after each convolution, and without auxiliary classifiers."""


Sizes = tuple[int, int, int, int, int, int, str, int]
"""Channels: in, 1x1, 3x3 reduce, 3x3, double 3x3 reduce, double 3x3; the pool, pool projection."""

INCEPTION_MODULES: tuple[Sizes, ...] = (
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
"""Modules of MXNet's network."""

TORCH_MODULES: dict[str, Sizes] = {
    "3a": (192, 64, 64, 64, 64, 96, "mean", 32),
    "3b": (256, 64, 64, 96, 64, 96, "mean", 64),
    "3c": (320, 0, 128, 160, 64, 96, "max", 0),
    "4a": (576, 224, 64, 96, 96, 128, "mean", 128),
    "4b": (576, 192, 96, 128, 96, 128, "mean", 128),
    "4c": (576, 160, 128, 160, 128, 160, "mean", 96),
    "4d": (576, 96, 128, 192, 160, 192, "mean", 96),
    "4e": (576, 0, 128, 192, 192, 256, "max", 0),
    "5a": (1024, 352, 192, 320, 160, 224, "mean", 128),
    "5b": (1024, 352, 192, 320, 192, 224, "max", 128),
}
"""Modules of Torch's network."""


class InceptionModule(nn.Module):
    """Inception module: three or four branches side by side."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        in_channels, one, reduce_three, three, reduce_double, double, pool, out_channels = sizes
        stride = 2 if pool == "half" else 1
        branches: list[nn.Module] = [convolution(in_channels, one, 1, norm=True)] if one else []
        branches.append(branch((in_channels, reduce_three, three), (1, 3), stride))
        branches.append(branch((in_channels, reduce_double, double, double), (1, 3, 3), stride))
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
        self.inception = nn.Sequential(*(InceptionModule(sizes) for sizes in INCEPTION_MODULES))
        self.classifier = nn.Linear(1024, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores before the softmax."""
        features: torch.Tensor = self.inception(self.first(images))
        scores: torch.Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores


class TorchGoogLeNet(nn.Module):
    """Network from images of shape (samples, channels, 224, 224) to scores of shape (samples, classes).

    In training it returns two scores: its own and those of the auxiliary classifier.
    """

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        first = (convolution(channels, 64, 7, 2, norm=True), _pool(), convolution(64, 64, 1, norm=True))
        modules = {name: InceptionModule(sizes) for name, sizes in TORCH_MODULES.items()}
        third, fourth, fifth = ([modules[name] for name in modules if name[0] == stage] for stage in "345")
        halves = [convolution(each, each, 2, 2, norm=True) for each in (576, 1024)]
        self.lower = nn.Sequential(*first, convolution(64, 192, 3, norm=True), _pool(), *third, halves[0], *fourth[:-1])
        self.upper = nn.Sequential(fourth[-1], halves[1], *fifth)
        self.classifier = nn.Linear(1024, classes)
        self.auxiliary = Auxiliary(576, classes, 768, norm=True)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-3
            elif isinstance(module, nn.Conv2d):
                module.bias = nn.Parameter(torch.zeros(module.out_channels))

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the scores before the softmax; in training, a tuple with the auxiliary ones."""
        lower = self.lower(images)
        scores: torch.Tensor = self.classifier(self.upper(lower).mean(dim=(2, 3)))
        return (scores, self.auxiliary(lower)) if self.training else scores
