"""How pictures are shown to a network: size, colours, what is changed at random, and the scale of the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.data.pictures.crops import MIDDLE, Box, Random, middle, scale_and_aspect

AUGMENTS = ("none", "mirror", "shift", "scale")
"""What is changed at random: nothing; left and right; that and the place, by an eighth; that and the part shown."""

MARGIN = 8
"""A picture is shifted by up to 1 / MARGIN of its size, over a margin of black."""


@dataclass(frozen=True)
class View:
    """Pictures become (size, size, colors), with `mean` and `deviation` of each colour, from 0 to 1, taken out."""

    size: int
    colors: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augment: str = "none"


@dataclass(frozen=True)
class Look:
    """One look at one picture: its part, whether it is mirrored, and by how much it is shifted, in pixels of `size`."""

    box: Box
    mirrored: bool = False
    right: int = 0
    down: int = 0


def look(view: View, width: int, height: int, random: Random | None) -> Look:
    """How a picture of this size is looked at: with random numbers in training, without in validation."""
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
