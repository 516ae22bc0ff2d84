"""Encoding of an image file as the bytes that are packed.

short side above `short_side`, EXIF rotation, CMYK or transparency   encoded again as a JPEG
else                                                                 unchanged, byte for byte
"""

from __future__ import annotations

import io

from PIL import Image

from unisono.data.images.decode import GREY_MODES, decode_image, pixels_of, upright
from unisono.errors import DecodeError

UNCHANGED_FORMATS = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "L", "P", "1")}
"""Formats, with their Pillow modes, that are packed unchanged."""


def encode_image(sample: bytes, short_side: int, quality: int) -> bytes:
    """Return the bytes to pack. Raises DecodeError if the image is broken or truncated.

    `short_side` is in pixels, 0 for all sizes; `quality` is that of JPEGs, 1 to 100.
    """
    image = decode_image(sample, rotate=False, min_side=2 * short_side)
    upright_image = upright(image)
    small = not short_side or min(image.size) <= short_side
    kept = image.mode in UNCHANGED_FORMATS.get(image.format or "", ()) and "transparency" not in image.info
    if upright_image is image and small and kept:
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
