"""Image decoder for any format: JPEG by libjpeg-turbo, other formats and CMYK JPEGs by Pillow.

Grey images get three equal channels if RGB is wanted. `decode_image` also rotates an image by its EXIF orientation;
images in packs were rotated when they were packed.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from unisono.data.images import turbojpeg
from unisono.data.images.crops import Box, part_of
from unisono.errors import DecodeError

Pixels = NDArray[np.uint8]
"""Pixels of an image: height x width x channels."""

Choose = Callable[[int, int], Box]
"""Function that returns the crop of an image, given its width and height."""

JPEG = b"\xff\xd8"

MODES = {1: "L", 3: "RGB"}

ORIENTATION = 0x0112
ROTATED = range(2, 9)

DAMAGE_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors that Pillow raises for files that are no images, or damaged."""


class ImageDecoder:
    """Decoder of crops of images, for one thread."""

    def __init__(self, channels: int) -> None:
        """Create the decoder. `channels` is 3, or 1 for grey images."""
        self._grey, self._mode = channels == 1, MODES[channels]
        self._jpeg = turbojpeg.JpegDecoder() if turbojpeg.library() else None

    def read(self, file: bytes, choose: Choose, size: int) -> tuple[Pixels, Box]:
        """Return the decoded pixels of an image that is to become size x size, and the chosen crop within them.

        Raises DecodeError if the bytes are no image.
        """
        box = None
        if self._jpeg is not None and file[:2] == JPEG:
            header = self._jpeg.header(file)
            if header is not None:
                box = choose(header.width, header.height)
                part, within = part_of(box, header.width, header.height, header.block, size)
                with suppress(DecodeError):  # some odd files can only be decoded as a whole
                    return self._jpeg.decode(file, part, self._grey), within
        pixels = pixels_of(decode_image(file, rotate=False), self._mode)
        return pixels, box or choose(pixels.shape[1], pixels.shape[0])


def decode_image(file: bytes, rotate: bool = True, min_side: int = 0) -> Image.Image:
    """Return a whole image, decoded by Pillow; with `rotate` it is rotated by its EXIF orientation.

    With `min_side` above 0, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if its short side still has `min_side`
    pixels. Raises DecodeError if the bytes are no image, or truncated.
    """
    try:
        image = Image.open(io.BytesIO(file))
        if min_side:
            image.draft(None, (min_side, min_side))
        image.load()
    except DAMAGE_ERRORS as error:
        raise DecodeError(" ".join(str(error).split()) or type(error).__name__) from error
    return upright(image) if rotate else image


def upright(image: Image.Image) -> Image.Image:
    """Return the image rotated by its EXIF orientation; the same image if that is missing or cannot be read."""
    try:
        return ImageOps.exif_transpose(image) if image.getexif().get(ORIENTATION) in ROTATED else image
    except DAMAGE_ERRORS:
        return image


def pixels_of(image: Image.Image, mode: str) -> Pixels:
    """Return the pixels in RGB ("RGB") or grey ("L"), uint8; transparent images are laid on white."""
    if image.mode in ("I;16", "I;16B", "I"):
        numbers = np.asarray(image).astype(np.uint32)
        clear = numbers == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(clear, 255, numbers >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        colored = image.convert("RGBA")
        white = Image.new("RGBA", colored.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, colored)
    pixels = np.array(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]
