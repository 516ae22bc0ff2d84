"""Which part of a picture a network is shown: pure functions of the picture's size and of random numbers.

    train       a part of 8% to 100% of the area, 3:4 to 4:3 in shape, anywhere; then to size x size, and mirrored or
                not (Szegedy et al. 2015, section 6: scale and aspect)
    validate    the square in the middle with 7/8 of the short side (224 of 256), to size x size

A JPEG's part is decoded at 1/2, 1/4 or 1/8 where that is still as large as what is wanted, so that nothing is made that
is thrown away again; it begins at a block of the file, a few pixels before the part:

    ┌───────────────────────┐
    │      ┌──┬──────┐      │   box       what is shown
    │      │  │ box  │      │   part      what is decoded: from the block's edge on
    │      └──┴──────┘      │
    └───────────────────────┘
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from unisono.data.pictures.turbojpeg import Part

SMALLEST, LARGEST = 0.08, 1.0
"""Share of the area that a part has."""

NARROWEST, WIDEST = 3 / 4, 4 / 3
"""Width over height."""

LOG_NARROWEST, LOG_WIDER = math.log(NARROWEST), math.log(WIDEST / NARROWEST)

TRIES = 10
"""Parts that are thrown until one fits."""

MIDDLE = 7 / 8
"""Share of the short side that is shown of a picture in validation."""

SHRINKS = (8, 4, 2)


class Box(NamedTuple):
    """A part of a picture, in its pixels."""

    x: int
    y: int
    width: int
    height: int


class Random(Protocol):
    """What throws the dice."""

    def random(self) -> float:
        """A number from 0 to below 1."""
        ...


def scale_and_aspect(width: int, height: int, random: Random) -> Box:
    """A part of random area, shape and place; the largest in the middle where none fits."""
    for _ in range(TRIES):
        area = (SMALLEST + (LARGEST - SMALLEST) * random.random()) * width * height
        shape = math.exp(LOG_NARROWEST + LOG_WIDER * random.random())
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            x = int(random.random() * (width - wide + 1))
            y = int(random.random() * (height - high + 1))
            return Box(x, y, wide, high)
    wide = min(width, round(height * WIDEST))
    high = min(height, round(width / NARROWEST))
    return Box((width - wide) // 2, (height - high) // 2, wide, high)


def middle(width: int, height: int, share: float = MIDDLE) -> Box:
    """The square in the middle with this share of the short side."""
    side = max(1, round(min(width, height) * share))
    return Box((width - side) // 2, (height - side) // 2, side, side)


def part_of(box: Box, width: int, height: int, block: int, size: int) -> tuple[Part, Box]:
    """What is to be decoded of a JPEG for a box to become size x size, and where the box lies in that.

    `block` is where the file's blocks begin, in pixels across.
    """
    shrink = next((each for each in SHRINKS if min(box.width, box.height) >= each * size), 1)
    step = max(1, block // shrink)
    right, bottom = -(-width // shrink), -(-height // shrink)
    x, y = min(box.x // shrink, right - 1), min(box.y // shrink, bottom - 1)
    wide = min(right - x, max(1, round(box.width / shrink)))
    high = min(bottom - y, max(1, round(box.height / shrink)))
    begins = x // step * step
    return Part(begins, y, x + wide - begins, high, shrink), Box(x - begins, 0, wide, high)
