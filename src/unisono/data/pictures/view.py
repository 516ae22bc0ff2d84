"""Settings of image inputs: size, channels, augmentation and normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.data.pictures.crops import MIDDLE, Box, Random, middle, scale_and_aspect

AUGMENTS = ("none", "mirror", "shift", "scale")
"""Augmentations: none; horizontal mirroring; mirroring and a shift by up to 1/8; mirroring and a random crop."""

MARGIN = 8
"""Images are shifted by up to 1 / MARGIN of their size, over a margin of black."""


@dataclass(frozen=True)
class View:
    """View of images: (size, size, colors), normalised by `mean` and `deviation` of each channel, for values 0 to 1."""

    size: int
    colors: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augment: str = "none"


@dataclass(frozen=True)
class Look:
    """Look at one image: its crop, True if it is mirrored, and its shift right and down, in pixels of `size`."""

    box: Box
    mirrored: bool = False
    right: int = 0
    down: int = 0


def look(view: View, width: int, height: int, random: Random | None) -> Look:
    """Return the look at an image of this size: with random numbers in training, without in validation."""
    if random is None:
        return Look(middle(width, height, MIDDLE if view.augment == "scale" else 1.0))
    if view.augment == "scale":
        return Look(scale_and_aspect(width, height, random), random.random() < 0.5)
    box = middle(width, height, 1.0)
    mirrored = view.augment != "none" and random.random() < 0.5
    if view.augment != "shift":
        return Look(box, mirrored)
    margin = view.size // MARGIN
    right, down = (int(random.random() * (2 * margin + 1)) - margin for _ in range(2))
    return Look(box, mirrored, right, down)
