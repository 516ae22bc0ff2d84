"""Decodes pictures of any kind: JPEG by libjpeg-turbo, the others, and JPEGs in printers' colours, by Pillow.

Greyscale becomes red, green and blue alike where colours are wanted. `read_any` also turns a picture as its camera says
(EXIF); what lies in packs was turned when it was packed.
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
"""Height x width x colours."""

Choose = Callable[[int, int], Box]
"""The part of a picture to show, from its width and height."""

JPEG = b"\xff\xd8"

MODES = {1: "L", 3: "RGB"}

ORIENTATION = 0x0112
TURNED = range(2, 9)

DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""What Pillow raises of files that are no pictures, or damaged."""


class Reader:
    """Reads parts of pictures in one thread."""

    def __init__(self, colors: int) -> None:
        """`colors` is 3, or 1 for grey pictures."""
        self._grey, self._mode = colors == 1, MODES[colors]
        self._jpeg = turbojpeg.Decoder() if turbojpeg.library() else None

    def read(self, file: bytes, choose: Choose, size: int) -> tuple[Pixels, Box]:
        """What is decoded of a picture that is to become size x size, and where in it the chosen part lies.

        Raises PictureError where the bytes are no picture.
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
    """A whole picture by Pillow; turned as its camera says.

    A JPEG may come at 1/2, 1/4 or 1/8 of its size, where its short side still has `enough` pixels, if that is not 0.
    Raises PictureError where it is no picture, or not all there.
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
    """The picture as its camera says; itself where that says nothing, or cannot be read."""
    try:
        return ImageOps.exif_transpose(picture) if picture.getexif().get(ORIENTATION) in TURNED else picture
    except DAMAGED:
        return picture


def pixels_of(picture: Image.Image, mode: str) -> Pixels:
    """The pixels in colours ("RGB") or grey ("L"); what shines through is laid on white."""
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
