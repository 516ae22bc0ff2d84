"""Images: files, in a pack JPEGs and PNGs, others are encoded again; and raw images, uint8 values of one shape.

    bytes ─ header ─▶ width, height ─ decisions (here) ─▶ crop, mirrored, shift ─ decode, resize ─▶ float32

Decisions, which `image_transform.py` carries out, are pure functions of the image's size and of random numbers:

    train       a part of 8% to 100% of the area, 3:4 to 4:3 in shape, anywhere; then to size x size, and mirrored or
                not (Szegedy et al. 2015, section 6: scale and aspect)
    or, "crop"  a square with 7/8 of the short side, anywhere; mirrored or not (Krizhevsky et al. 2012: 224 of 256)
    validate    the square in the middle with 7/8 of the short side (224 of 256), to size x size

A crop of a JPEG is decoded at 1/2, 1/4 or 1/8 if that is still as large as the size wanted, so that no work is wasted.
The part that is decoded begins at a block of the file, a few pixels before the crop:

    ┌───────────────────────┐
    │      ┌──┬──────┐      │   box       the crop
    │      │  │ box  │      │   part      the decoded part: from the block's edge on
    │      └──┴──────┘      │
    └───────────────────────┘
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from unisono.data.kinds import IMAGE, Bytes, SampleKind, SampleTransform
from unisono.errors import PackError

if TYPE_CHECKING:
    from unisono.data.options import DataOptions
    from unisono.data.order import CounterRNG
    from unisono.data.pack.index import Index
    from unisono.data.pack.packing import PackOptions


MIN_AREA, MAX_AREA = 0.08, 1.0
"""Range of a random crop's share of the area."""

MIN_ASPECT, MAX_ASPECT = 3 / 4, 4 / 3
"""Range of a random crop's width over its height."""

LOG_MIN_ASPECT, LOG_ASPECT_RANGE = math.log(MIN_ASPECT), math.log(MAX_ASPECT / MIN_ASPECT)

MAX_TRIES = 10
"""Largest number of random crops that are tried until one fits."""

VALIDATION_CROP = 7 / 8
"""Share of an image's short side that is used in validation, with the augmentations "scale" and "crop"."""

SCALE_DIVISORS = (8, 4, 2)


class Box(NamedTuple):
    """Crop of an image, in pixels of the image."""

    x: int
    y: int
    width: int
    height: int


class Part(NamedTuple):
    """Part of an image that is decoded at 1 / `shrink` of its size, in pixels of that smaller image."""

    x: int
    y: int
    width: int
    height: int
    shrink: int


class ImageHeader(NamedTuple):
    """Properties of an image, known before its pixels are decoded."""

    width: int
    height: int
    block: int | None = None
    """Width in pixels of a JPEG's blocks, at which a part can begin; None if the image is decoded as a whole."""


def scale_and_aspect(width: int, height: int, random: CounterRNG) -> Box:
    """Return a crop of random area, aspect ratio and position; if none of MAX_TRIES fits, the largest in the middle."""
    for _ in range(MAX_TRIES):
        area = (MIN_AREA + (MAX_AREA - MIN_AREA) * random.random()) * width * height
        shape = math.exp(LOG_MIN_ASPECT + LOG_ASPECT_RANGE * random.random())
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            x = int(random.random() * (width - wide + 1))
            y = int(random.random() * (height - high + 1))
            return Box(x, y, wide, high)
    wide = min(width, round(height * MAX_ASPECT))
    high = min(height, round(width / MIN_ASPECT))
    return Box((width - wide) // 2, (height - high) // 2, wide, high)


def middle(width: int, height: int, share: float = VALIDATION_CROP) -> Box:
    """Return the square in the middle with this share of the short side."""
    side = max(1, round(min(width, height) * share))
    return Box((width - side) // 2, (height - side) // 2, side, side)


def part_of(box: Box, width: int, height: int, block: int, size: int) -> tuple[Part, Box]:
    """Return the part of a JPEG to decode so that `box` can become size x size, and the box within that part.

    `block` is the width of the file's blocks in pixels: a part can begin only at a block.
    """
    shrink = next((each for each in SCALE_DIVISORS if min(box.width, box.height) >= each * size), 1)
    step = max(1, block // shrink)
    right, bottom = -(-width // shrink), -(-height // shrink)
    x, y = min(box.x // shrink, right - 1), min(box.y // shrink, bottom - 1)
    wide = min(right - x, max(1, round(box.width / shrink)))
    high = min(bottom - y, max(1, round(box.height / shrink)))
    begins = x // step * step
    return Part(begins, y, x + wide - begins, high, shrink), Box(x - begins, 0, wide, high)


AUGMENTS = ("none", "mirror", "shift", "scale", "crop")
"""Augmentations: none; horizontal mirroring; mirroring and a shift by up to 1/8; mirroring and a random crop, of random
scale and aspect or of one size."""

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
    mean_image: tuple[float, ...] = ()
    """Numbers of MEAN_SIDE x MEAN_SIDE pixels, which take the place of `mean`; empty: none do."""


@dataclass(frozen=True)
class ImageAugmentation:
    """Augmentation of one image: its crop, mirroring, and its shift right and down, in pixels of `size`."""

    box: Box
    mirrored: bool = False
    right: int = 0
    down: int = 0


def choose_augmentation(options: ImageOptions, width: int, height: int, random: CounterRNG | None) -> ImageAugmentation:
    """Return the augmentation of an image of this size: with random numbers in training, without in validation."""
    if random is None:
        cropped = options.augment in ("scale", "crop")
        return ImageAugmentation(middle(width, height, VALIDATION_CROP if cropped else 1.0))
    if options.augment == "scale":
        return ImageAugmentation(scale_and_aspect(width, height, random), random.random() < 0.5)
    if options.augment == "crop":
        side = middle(width, height).width
        x, y = (int(random.random() * (extent - side + 1)) for extent in (width, height))
        return ImageAugmentation(Box(x, y, side, side), random.random() < 0.5)
    box = middle(width, height, 1.0)
    mirrored = options.augment != "none" and random.random() < 0.5
    if options.augment != "shift":
        return ImageAugmentation(box, mirrored)
    margin = options.size // MARGIN_DIVISOR
    right, down = (int(random.random() * (2 * margin + 1)) - margin for _ in range(2))
    return ImageAugmentation(box, mirrored, right, down)


MEAN_SIDE = 32
"""Height and width of a mean image: that of photographs is smooth."""

MIN_SIDE = 64
"""Pixels of the short side that are enough to measure an image: larger JPEGs may be decoded smaller."""


def image_options(index: Index, options: DataOptions) -> ImageOptions:
    """Return the options of a pack's images. Raises PackError if it lacks a common size or a mean image to take."""
    about = index.about
    height, width = about.shape[:2] if about.shape else (0, 1)
    if not options.size and height != width:
        what = f"images of {height} x {width}, which are not square" if about.shape else "encoded images"
        raise PackError(f"{index.folder} has {what}: set data.size (size= of Loader) to the size of the inputs")
    if options.mean == "image" and not about.mean_image:
        raise PackError(f'data.mean = "image", but {index.folder} has no mean image; pack the data again')
    mean_image = about.mean_image if options.mean == "image" else ()
    return ImageOptions(options.size or height, len(about.mean), about.mean, about.std, options.augment, mean_image)


class ImageKind(SampleKind):
    """Image files."""

    plural = "images"
    column = "image"
    endings = (
        *(".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
        *(".jfif", ".jpe", ".avif"),
    )
    augments = AUGMENTS

    def encode(self, sample: bytes, options: PackOptions) -> bytes:
        """Return the file, or a JPEG of it with the short side of `options`."""
        from unisono.data.kinds.image_codec import encode_image  # noqa: PLC0415  Pillow is of the extra `data`

        return encode_image(sample, options.short_side, options.quality)

    def is_packed_unchanged(self, sample: bytes, short_side: int = 0) -> bool:
        from unisono.data.kinds.image_codec import is_packed_unchanged  # noqa: PLC0415

        return is_packed_unchanged(sample, short_side)

    def transform(self, index: Index, options: DataOptions) -> Callable[[], SampleTransform]:
        from unisono.data.kinds.image_transform import ImageDecoder, ImageTransform  # noqa: PLC0415  needs PyTorch

        settings = image_options(index, options)
        return lambda: ImageTransform(settings, ImageDecoder(settings.channels))

    def pixels(self, sample: Bytes, shape: tuple[int, ...] | None) -> Bytes | None:  # noqa: ARG002  files have a size
        """Return the decoded pixels, (height, width, 1 if grey or else 3)."""
        from unisono.data.kinds.image_codec import GREY_MODES, decode_image, pixels_of  # noqa: PLC0415

        image = decode_image(sample.tobytes(), min_side=MIN_SIDE)
        return pixels_of(image, "L" if image.mode in GREY_MODES else "RGB")

    def is_grey(self, sample: Bytes) -> bool:
        from PIL import Image  # noqa: PLC0415

        from unisono.data.kinds.image_codec import GREY_MODES  # noqa: PLC0415

        with Image.open(io.BytesIO(sample.tobytes())) as image:
            return image.mode in GREY_MODES


class RawKind(SampleKind):
    """Raw images, whose shape the pack has."""

    plural = "images"
    column = "image"
    file_kind = IMAGE
    augments = AUGMENTS

    def transform(self, index: Index, options: DataOptions) -> Callable[[], SampleTransform]:
        from unisono.data.kinds.image_transform import ImageTransform, RawDecoder  # noqa: PLC0415

        settings, shape = image_options(index, options), index.about.shape
        assert shape is not None, "raw samples have a shape"
        return lambda: ImageTransform(settings, RawDecoder(shape))

    def pixels(self, sample: Bytes, shape: tuple[int, ...] | None) -> Bytes | None:
        assert shape is not None, "raw samples have a shape"
        return sample.reshape(*shape[:2], -1)
