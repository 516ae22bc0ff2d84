"""The layers of the seeds' networks for images of 224 x 224: parameters and multiplications, without weights.

>>> [round(sum(layer.parameters for layer in layers) / 1e6, 1) for layers in NETWORKS.values()]
[25.6, 132.9, 61.1]
"""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """A layer with weights."""

    parameters: int
    multiplications: int
    """Of the forward pass, for one sample."""


def convolution(channels: int, filters: int, kernel: int, side: int, normalised: bool = False) -> Layer:
    """A convolution with bias, or with batch normalisation behind it, whose output has `side` x `side` places."""
    weights = channels * filters * kernel * kernel
    return Layer(weights + filters * (2 if normalised else 1), weights * side * side)


def linear(inputs: int, outputs: int) -> Layer:
    """A fully connected layer."""
    return Layer(inputs * outputs + outputs, inputs * outputs)


def alexnet() -> list[Layer]:
    """AlexNet in one column (Krizhevsky 2014)."""
    shapes = [(3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13), (256, 256, 3, 13)]
    return [convolution(*shape) for shape in shapes] + [linear(9216, 4096), linear(4096, 4096), linear(4096, 1000)]


def vgg_a() -> list[Layer]:
    """VGG with eleven layers."""
    shapes = [(3, 64, 3, 224), (64, 128, 3, 112), (128, 256, 3, 56), (256, 256, 3, 56)]
    shapes += [(256, 512, 3, 28), (512, 512, 3, 28), (512, 512, 3, 14), (512, 512, 3, 14)]
    return [convolution(*shape) for shape in shapes] + [linear(25088, 4096), linear(4096, 4096), linear(4096, 1000)]


def resnet_50() -> list[Layer]:
    """ResNet-50: four groups of bottlenecks."""
    layers = [convolution(3, 64, 7, 112, normalised=True)]
    channels = 64
    for blocks, width, side in ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)):
        for block in range(blocks):
            layers.append(convolution(channels, width, 1, side, normalised=True))
            layers.append(convolution(width, width, 3, side, normalised=True))
            layers.append(convolution(width, 4 * width, 1, side, normalised=True))
            if block == 0:
                layers.append(convolution(channels, 4 * width, 1, side, normalised=True))
            channels = 4 * width
    return [*layers, linear(2048, 1000)]


NETWORKS = {"ResNet-50": resnet_50(), "VGG-A": vgg_a(), "AlexNet": alexnet()}
