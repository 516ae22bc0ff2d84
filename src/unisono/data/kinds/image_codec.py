"""Image files as a whole, by Pillow: decoding, and encoding for a pack. Batches are decoded in `image_transform.py`.

An image file is packed unchanged, byte for byte, unless its short side is above `short_side`, or it is rotated by EXIF,
CMYK or transparent: then it is encoded again as a JPEG.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from unisono.errors import DecodeError

Pixels = NDArray[np.uint8]
"""Pixels of an image: height x width x channels."""

WIDE_MODES = {"I", "I;16", "I;16L", "I;16B"}
"""Pillow's modes of grey images of 16 bits."""

GREY_MODES = {"L", "1", *WIDE_MODES}
"""Pillow's modes of grey images."""

DAMAGE_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, RuntimeError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors that Pillow raises for files that are no images, or damaged."""


def decode_image(file: bytes, min_side: int = 0) -> Image.Image:
    """Return a whole image as it is stored, decoded by Pillow.

    With `min_side` above 0, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size if its short side still has `min_side`
    pixels. Raises DecodeError if the bytes are no image, or truncated.
    """
    with damage_named():
        image = Image.open(io.BytesIO(file))
        if min_side:
            image.draft(None, (min_side, min_side))
        image.load()
    return image


def upright(image: Image.Image) -> Image.Image:
    """Return the image rotated by its EXIF orientation; the same image if that is missing or cannot be read."""
    with suppress(*DAMAGE_ERRORS):
        return ImageOps.exif_transpose(image) if _is_rotated(image) else image
    return image


def _is_rotated(image: Image.Image) -> bool:
    with suppress(*DAMAGE_ERRORS):
        return image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    return False


def pixels_of(image: Image.Image, mode: str) -> Pixels:
    """Return the pixels in RGB ("RGB") or grey ("L"), uint8; transparent images are laid on white."""
    if image.mode in WIDE_MODES:
        numbers = np.asarray(image).astype(np.uint32)
        clear = numbers == image.info.get("transparency", -1)
        image = Image.fromarray(np.where(clear, 255, numbers >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        colored = image.convert("RGBA")
        white = Image.new("RGBA", colored.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, colored)
    pixels = np.array(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


@contextmanager
def damage_named() -> Iterator[None]:
    """Turn Pillow's errors into a DecodeError of one line."""
    try:
        yield
    except UnidentifiedImageError as error:  # its own text has the address of a buffer
        raise DecodeError("it is no image in a format that Pillow knows") from error
    except DAMAGE_ERRORS as error:
        raise DecodeError(" ".join(str(error).split()) or type(error).__name__) from error


UNCHANGED_FORMATS = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "L", "P", "1")}
"""Formats, with their Pillow modes, that are packed unchanged."""


def keeps_file(image: Image.Image) -> bool:
    """Return True if an image's file has a format that is packed unchanged."""
    return image.mode in UNCHANGED_FORMATS.get(image.format or "", ()) and "transparency" not in image.info


def is_packed_unchanged(sample: bytes, short_side: int = 0) -> bool:
    """Return True if an image is packed byte for byte, by its header; `short_side` as below. Raises DecodeError."""
    with damage_named():
        image = Image.open(io.BytesIO(sample))
    small = not short_side or min(image.size) <= short_side
    return small and keeps_file(image) and not _is_rotated(image)


def encode_image(sample: bytes, short_side: int, quality: int) -> bytes:
    """Return the bytes to pack. Raises DecodeError if the image is broken or truncated.

    `short_side` is in pixels, 0 for all sizes; `quality` is that of JPEGs, 1 to 100.
    """
    image = decode_image(sample, min_side=2 * short_side)
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):  # these two have 16 bits
        pixel_type = "floating-point numbers" if image.mode == "F" else "integers of 32 bits"
        raise DecodeError(f"its pixels are {pixel_type} of an unknown range; convert it to 8 or 16 bits")
    upright_image = upright(image)
    small = not short_side or min(image.size) <= short_side
    if upright_image is image and small and keeps_file(image):
        return sample
    grey = image.mode in GREY_MODES
    pixels = pixels_of(upright_image, "L" if grey else "RGB")
    made = Image.fromarray(pixels[..., 0] if grey else pixels)
    if not small:
        scale = short_side / min(made.size)
        size = (max(1, round(made.width * scale)), max(1, round(made.height * scale)))
        made = made.resize(size, Image.Resampling.LANCZOS)
    out = io.BytesIO()
    try:
        made.save(out, "JPEG", quality=quality)
    except OSError as error:
        raise DecodeError(f"{made.width} x {made.height} pixels are too many for a JPEG") from error
    return out.getvalue()
