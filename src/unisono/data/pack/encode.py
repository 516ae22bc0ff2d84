"""Encoding of a sample of the data set as the bytes that are packed.

    image    short side above `short_side`, EXIF rotation, CMYK or transparency   encoded again as a JPEG
             else                                                                 unchanged, byte for byte
    audio    unchanged: a wav file with 16-bit integers
    raw      unchanged

Empty, broken and truncated samples are refused.
"""

from __future__ import annotations

import io

from PIL import Image

from unisono.data.audio.wav import read_wav
from unisono.data.images.decode import decode_image, pixels_of, upright
from unisono.data.sources.source import AUDIO, IMAGE
from unisono.errors import DecodeError

UNCHANGED_FORMATS = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "L", "P", "1")}
"""Formats, with their Pillow modes, that are packed unchanged."""


def encode(kind: str, sample: bytes, short_side: int, quality: int) -> bytes:
    """Return the bytes to pack. Raises DecodeError if the sample is empty, broken or truncated."""
    if not sample:
        raise DecodeError("it is empty")
    if kind == AUDIO:
        read_wav(sample)
    return _encode_image(sample, short_side, quality) if kind == IMAGE else sample


def _encode_image(sample: bytes, short_side: int, quality: int) -> bytes:
    image = decode_image(sample, rotate=False, min_side=2 * short_side)
    upright_image = upright(image)
    small = not short_side or min(image.size) <= short_side
    kept = image.mode in UNCHANGED_FORMATS.get(image.format or "", ()) and "transparency" not in image.info
    if upright_image is image and small and kept:
        return sample
    grey = image.mode in ("L", "1", "I;16", "I")
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
