"""Decoding of images of any format: JPEG by libjpeg-turbo, other formats and CMYK JPEGs by Pillow.

Grey images get three equal channels if RGB is wanted. `read_any` also rotates an image by its EXIF orientation; images
in packs were rotated when they were packed.
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

from unisono.data.pictures import turbojpeg
from unisono.data.pictures.crops import Box, part_of
from unisono.errors import PictureError

Pixels = NDArray[np.uint8]
"""Pixels of an image: height x width x channels."""

Choose = Callable[[int, int], Box]
"""Function that returns the crop of an image, given its width and height."""

JPEG = b"\xff\xd8"

MODES = {1: "L", 3: "RGB"}

ORIENTATION = 0x0112
TURNED = range(2, 9)

DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors that Pillow raises for files that are no images, or damaged."""


class Reader:
    """Reader of crops of images, for one thread."""

    def __init__(self, colors: int) -> None:
        """Create the reader. `colors` is the number of channels: 3, or 1 for grey images."""
        self._grey, self._mode = colors == 1, MODES[colors]
        self._jpeg = turbojpeg.Decoder() if turbojpeg.library() else None

    def read(self, file: bytes, choose: Choose, size: int) -> tuple[Pixels, Box]:
        """Return the decoded pixels of an image that is to become size x size, and the chosen crop within them.

        Raises PictureError if the bytes are no image.
        """
        box = None
        if self._jpeg is not None and file[:2] == JPEG:
            header = self._jpeg.header(file)
            if header is not None:
                box = choose(header.width, header.height)
                part, within = part_of(box, header.width, header.height, header.block, size)
                with suppress(PictureError):  # of odd files no part can be decoded, but the whole can
                    return self._jpeg.decode(file, part, self._grey), within
        pixels = pixels_of(read_any(file, turn=False), self._mode)
        return pixels, box or choose(pixels.shape[1], pixels.shape[0])


def read_any(file: bytes, turn: bool = True, enough: int = 0) -> Image.Image:
    """Return a whole image, decoded by Pillow; with `turn` it is rotated by its EXIF orientation.

    With `enough` above 0, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if its short side still has `enough`
    pixels. Raises PictureError if the bytes are no image, or truncated.
    """
    try:
        picture = Image.open(io.BytesIO(file))
        if enough:
            picture.draft(None, (enough, enough))
        picture.load()
    except DAMAGED as error:
        raise PictureError(" ".join(str(error).split()) or type(error).__name__) from error
    return upright(picture) if turn else picture


def upright(picture: Image.Image) -> Image.Image:
    """Return the image rotated by its EXIF orientation; the same image if that is missing or cannot be read."""
    try:
        return ImageOps.exif_transpose(picture) if picture.getexif().get(ORIENTATION) in TURNED else picture
    except DAMAGED:
        return picture


def pixels_of(picture: Image.Image, mode: str) -> Pixels:
    """Return the pixels in RGB ("RGB") or grey ("L"), uint8; transparent images are laid on white."""
    if picture.mode in ("I;16", "I;16B", "I"):
        numbers = np.asarray(picture).astype(np.uint32)
        clear = numbers == picture.info.get("transparency", -1)
        picture = Image.fromarray(np.where(clear, 255, numbers >> 8).clip(0, 255).astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        colored = picture.convert("RGBA")
        white = Image.new("RGBA", colored.size, (255, 255, 255, 255))
        picture = Image.alpha_composite(white, colored)
    pixels = np.array(picture.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]
