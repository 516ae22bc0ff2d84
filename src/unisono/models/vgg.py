"""VGG with 11 (A), 16 (D) and 19 (E) layers (Simonyan and Zisserman 2015, table 1).

    A    64    │ 128     │ 256 256         │ 512 512         │ 512 512         │ 4,096 ─ 4,096 ─ classes
    16   64 64 │ 128 128 │ 256 256 256     │ 512 512 512     │ 512 512 512     │
    19   64 64 │ 128 128 │ 256 256 256 256 │ 512 512 512 512 │ 512 512 512 512 │   3x3 all; a bar is a pool, half

For 1,000 classes and 3 channels: A has 132,863,336 parameters and takes 7.61 billion multiply-adds per image, 16 has
138,357,544 (Theano-MPI's table 2) and takes 15.47, 19 has 143,667,240 and takes 19.63.
"""

from __future__ import annotations

from torch import nn

from unisono.models.convnet import Convnet, wide_classifier

WIDTHS = (64, 128, 256, 512, 512)
DEPTHS_A, DEPTHS_16, DEPTHS_19 = (1, 1, 2, 2, 2), (2, 2, 3, 3, 3), (2, 2, 4, 4, 4)
"""Numbers of convolutions between two pools."""


class VGG(Convnet):
    """Network from images of shape (samples, channels, 224, 224) to scores of shape (samples, classes)."""

    def __init__(self, classes: int, channels: int, depths: tuple[int, ...]) -> None:
        super().__init__()
        in_channels, layers = channels, list[nn.Module]()
        for width, depth in zip(WIDTHS, depths, strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(in_channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = wide_classifier(512 * 7 * 7, 4096, 4096, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # they have one


def vgg_a(classes: int, channels: int = 3) -> VGG:
    """Return VGG-A."""
    return VGG(classes, channels, DEPTHS_A)


def vgg16(classes: int, channels: int = 3) -> VGG:
    """Return VGG-16."""
    return VGG(classes, channels, DEPTHS_16)


def vgg19(classes: int, channels: int = 3) -> VGG:
    """Return VGG-19."""
    return VGG(classes, channels, DEPTHS_19)
