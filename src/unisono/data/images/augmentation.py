"""Options of image inputs (size, channels, normalisation), and augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unisono.data.images.crops import VALIDATION_CROP, Box, Random, middle, scale_and_aspect
from unisono.errors import PackError

if TYPE_CHECKING:
    from unisono.data.kinds.kind import TransformOptions
    from unisono.data.pack.index import Index

AUGMENTS = ("none", "mirror", "shift", "scale")
"""Augmentations: none; horizontal mirroring; mirroring and a shift by up to 1/8; mirroring and a random crop."""

MARGIN_DIVISOR = 8
"""Images are shifted by up to 1 / MARGIN_DIVISOR of their size, over a margin of black."""


@dataclass(frozen=True)
class ImageOptions:
    """Options of image inputs, (size, size, channels): values 0 to 1, normalised by each channel's `mean` and `std`."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str = "none"


@dataclass(frozen=True)
class ImageAugmentation:
    """Augmentation of one image: its crop, mirroring, and its shift right and down, in pixels of `size`."""

    box: Box
    mirrored: bool = False
    right: int = 0
    down: int = 0


def image_options(index: Index, options: TransformOptions) -> ImageOptions:
    """Return the options of a pack's images. Raises PackError if no size is given and they have no common one."""
    about = index.about
    size = options.size
    if not size:
        if about.shape is None or about.shape[0] != about.shape[1]:
            raise PackError(f"{index.folder} has images of different sizes; set data.size to the size of the inputs")
        size = about.shape[0]
    return ImageOptions(size, len(about.mean), about.mean, about.std, options.augment)


def choose_augmentation(options: ImageOptions, width: int, height: int, random: Random | None) -> ImageAugmentation:
    """Return the augmentation of an image of this size: with random numbers in training, without in validation."""
    if random is None:
        return ImageAugmentation(middle(width, height, VALIDATION_CROP if options.augment == "scale" else 1.0))
    if options.augment == "scale":
        return ImageAugmentation(scale_and_aspect(width, height, random), random.random() < 0.5)
    box = middle(width, height, 1.0)
    mirrored = options.augment != "none" and random.random() < 0.5
    if options.augment != "shift":
        return ImageAugmentation(box, mirrored)
    margin = options.size // MARGIN_DIVISOR
    right, down = (int(random.random() * (2 * margin + 1)) - margin for _ in range(2))
    return ImageAugmentation(box, mirrored, right, down)
