"""Networks of one layer after another: AlexNet, OverFeat, VGG, a small one, and CD-DNN.

AlexNet (Krizhevsky et al. 2012) in Caffe's form: three convolutions in two groups, local response normalisation,
dropout. For 1,000 classes and 3 channels it has 60,965,224 parameters, as in Theano-MPI's table 2, and an image takes
0.72 billion multiply-adds, 0.67 in convolutions. With batch norm in place of local response normalisation (swCaffe 6.1,
which says no more), each convolution and the two wide layers have one, and there is no dropout: chosen here.

OverFeat's fast network (Sermanet et al. 2014, table 1), which PCL-DNN measures, has 145,920,872 parameters, and an
image takes 2.80 billion multiply-adds.

VGG with 11 (A), 16 (D) and 19 (E) layers (Simonyan and Zisserman 2015, table 1): A has 132,863,336 parameters and takes
7.61 billion multiply-adds per image, 16 has 138,357,544 (Theano-MPI's table 2) and takes 15.47, 19 has 143,667,240 and
takes 19.63.

The small one, for grey images of 8 x 8, has 159,626 parameters for 10 classes.

CD-DNN, a network for speech (PCL-DNN 5.4, Seide et al. 2011), has seven hidden layers over frames with their context:

    a recording    window 0   log p(class | window 0) ─┐
                   window 1   log p(class | window 1) ─┼─ mean ─ its scores
                   window 2   log p(class | window 2) ─┘

Each window has its posterior, the softmax. A recording's scores are the mean of the log posteriors over its windows:
the product of the posteriors, as if windows were independent, and the root of that. The cross entropy makes it a
distribution again; for a single window it is the posterior itself. For 440 inputs (11 frames of 40 numbers) and 10
classes it has 26,101,770 parameters, and a window takes 26.1 million multiply-adds.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import nn


class Convnet(nn.Module):
    """Network from images of shape (samples, channels, height, width) to scores of shape (samples, classes)."""

    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores before the softmax."""
        scores: torch.Tensor = self.classifier(self.features(images))
        return scores


class Convolution(NamedTuple):
    """Convolution with a relu."""

    out_channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1


def features(channels: int, *parts: Convolution | nn.Module) -> nn.Sequential:
    """Return convolutions of images with so many channels, each followed by a relu, and the layers between them."""
    layers = list[nn.Module]()
    for part in parts:
        if isinstance(part, Convolution):
            out_channels, kernel, stride, padding, groups = part
            layers += [nn.Conv2d(channels, out_channels, kernel, stride, padding, groups=groups), nn.ReLU(inplace=True)]
            channels = out_channels
        else:
            layers.append(part)
    return nn.Sequential(*layers)


def wide_classifier(inputs: int, width: int, classes: int) -> nn.Sequential:
    """Return hidden layers of `width` and of 4096 with relu and dropout, and a layer of `classes` scores."""
    first = nn.Linear(inputs, width), nn.ReLU(inplace=True), nn.Dropout()
    second = nn.Linear(width, 4096), nn.ReLU(inplace=True), nn.Dropout()
    return nn.Sequential(nn.Flatten(), *first, *second, nn.Linear(4096, classes))


def small_convnet(classes: int, channels: int = 1) -> Convnet:
    """Return the network from images of shape (samples, channels, 8, 8)."""
    first, second, third = (Convolution(width, 3, padding=1) for width in (32, 64, 128))
    layers = features(channels, first, second, nn.MaxPool2d(2), third, nn.MaxPool2d(2))
    return Convnet(layers, nn.Sequential(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, classes)))


def overfeat_fast(classes: int, channels: int = 3) -> Convnet:
    """Return the network from images of shape (samples, channels, 231, 231)."""
    layers = features(
        channels,
        *(Convolution(96, 11, 4), nn.MaxPool2d(2), Convolution(256, 5), nn.MaxPool2d(2)),
        *(Convolution(width, 3, padding=1) for width in (512, 1024, 1024)),
        nn.MaxPool2d(2),
    )
    return Convnet(layers, wide_classifier(1024 * 6 * 6, 3072, classes))


def vgg(classes: int, channels: int = 3, *, depths: tuple[int, ...]) -> Convnet:
    """Return the network from images of shape (samples, channels, 224, 224); `depths` are the convolutions between two
    pools."""
    parts = list[Convolution | nn.Module]()
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        parts += [*[Convolution(width, 3, padding=1)] * depth, nn.MaxPool2d(2)]
    network = Convnet(features(channels, *parts), wide_classifier(512 * 7 * 7, 4096, classes))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # they have one
    return network


vgg_a, vgg16, vgg19 = (partial(vgg, depths=depths) for depths in ((1, 1, 2, 2, 2), (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)))


ALEXNET = (
    Convolution(96, 11, 4, 2),
    Convolution(256, 5, padding=2, groups=2),
    Convolution(384, 3, padding=1),
    Convolution(384, 3, padding=1, groups=2),
    Convolution(256, 3, padding=1, groups=2),
)
"""Convolutions of AlexNet: a pool follows the first two and the last."""


def alexnet(classes: int, channels: int = 3) -> Convnet:
    """Return the network from images of shape (samples, channels, 224, 224)."""
    first, second, *others = ALEXNET
    layers = features(
        channels,
        *(first, nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)),
        *(second, nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)),
        *others,
        nn.MaxPool2d(3, 2),
    )
    return Convnet(layers, wide_classifier(256 * 6 * 6, 4096, classes))


class _Norm(nn.BatchNorm1d):
    """Batch norm that uses its running statistics where a rank's share is a single sample, which has no variance."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 1:
            return super().forward(inputs)
        return nn.functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def alexnet_bn(classes: int, channels: int = 3) -> Convnet:
    """Return the network from images of shape (samples, channels, 224, 224)."""
    layers = list[nn.Module]()
    for index, (out_channels, kernel, stride, padding, groups) in enumerate(ALEXNET):
        convolution = nn.Conv2d(channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)))
        layers += [nn.MaxPool2d(3, 2)] if index in (0, 1, 4) else []
        channels = out_channels
    hidden = [
        layer
        for inputs in (256 * 6 * 6, 4096)
        for layer in (nn.Linear(inputs, 4096, bias=False), _Norm(4096), nn.ReLU(inplace=True))
    ]
    return Convnet(nn.Sequential(*layers), nn.Sequential(nn.Flatten(), *hidden, nn.Linear(4096, classes)))


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
