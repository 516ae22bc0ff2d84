"""Conversion of a sample of the data set to the bytes that are packed.

    a picture   short side above `short_side`, turned by its camera, or in printers' colours   made anew as a JPEG
                else                                                                          as it is, byte for byte
    a sound     as it is: a wav file with whole numbers of 16 bits
    raw         as it is

Empty, broken and truncated samples are refused.
"""

from __future__ import annotations

import io

from PIL import Image

from unisono.data.pictures.picture import pixels_of, read_any, upright
from unisono.data.sounds.wav import read_wav
from unisono.data.sources.source import PICTURE, SOUND
from unisono.errors import PictureError

KEPT = {"JPEG": ("RGB", "L"), "PNG": ("RGB", "L", "P", "1")}
"""Formats, with their Pillow modes, that are packed unchanged."""


def make(kind: str, sample: bytes, short_side: int, quality: int) -> bytes:
    """Return the bytes to pack. Raises PictureError if the sample is empty, broken or truncated."""
    if not sample:
        raise PictureError("it is empty")
    if kind == SOUND:
        read_wav(sample)
    return _picture(sample, short_side, quality) if kind == PICTURE else sample


def _picture(sample: bytes, short_side: int, quality: int) -> bytes:
    picture = read_any(sample, turn=False, enough=2 * short_side)
    turned = upright(picture)
    small = not short_side or min(picture.size) <= short_side
    kept = picture.mode in KEPT.get(picture.format or "", ()) and "transparency" not in picture.info
    if turned is picture and small and kept:
        return sample
    grey = picture.mode in ("L", "1", "I;16", "I")
    pixels = pixels_of(turned, "L" if grey else "RGB")
    made = Image.fromarray(pixels[..., 0] if grey else pixels)
    if not small:
        scale = short_side / min(made.size)
        size = (max(1, round(made.width * scale)), max(1, round(made.height * scale)))
        made = made.resize(size, Image.Resampling.LANCZOS)
    out = io.BytesIO()
    try:
        made.save(out, "JPEG", quality=quality)
    except OSError as error:
        raise PictureError(f"{made.width} x {made.height} pixels are too many for a JPEG") from error
    return out.getvalue()
