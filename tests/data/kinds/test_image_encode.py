from __future__ import annotations

import io
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from unisono.data.kinds.image import ImageOptions
from unisono.data.kinds.image_codec import encode_image
from unisono.data.kinds.image_transform import ImageDecoder, ImageTransform
from unisono.errors import DecodeError

ORIENTATION = 0x0112
BROKEN = {
    "words": b"these are words",
    "zeros": bytes(2000),
    "start": b"\xff\xd8",
    "png": b"\x89PNG\r\n\x1a\n",
}
FORMATS = ["JPEG", "PNG", "GIF", "WEBP", "BMP", "PPM", "TIFF"]


def photo(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A smooth image, of two waves across."""
    y, x = np.mgrid[:height, :width] * (4 * np.pi / max(width, height))
    waves = np.stack([np.sin(x + y / 3), np.cos(x / 3 - y / 2), np.sin((x + y) / 2)], axis=-1)
    return Image.fromarray((127.5 + 110 * waves).astype(np.uint8)).convert(mode)


def saved(picture: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)
    return out.getvalue()


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def off(image: Image.Image, expected: Image.Image) -> float:
    """Levels that two images differ by, in the mean."""
    assert image.size == expected.size
    return float(np.abs(np.asarray(image, np.int64) - np.asarray(expected, np.int64)).mean())


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("side", [0, 40, 64])
def test_a_jpeg_that_is_small_enough_stays_as_it_is(mode: str, side: int) -> None:
    file = saved(photo(60, 40, mode), quality=50, progressive=True)
    assert encode_image(file, side, 90) == file


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_a_png_that_is_small_enough_stays_as_it_is(mode: str) -> None:
    file = saved(photo(60, 40, mode), "PNG")
    assert encode_image(file, 40, 90) == file


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [((60, 40), 20, (30, 20)), ((40, 61), 20, (20, 30)), ((500, 301), 37, (61, 37)), ((41, 41), 40, (40, 40))],
)
def test_a_larger_image_is_made_so_that_its_short_side_is_as_wanted(
    kind: str, size: tuple[int, int], side: int, expected: tuple[int, int]
) -> None:
    made = opened(encode_image(saved(photo(*size), kind, quality=95), side, 95))
    assert made.format == "JPEG"
    assert made.size == expected
    assert off(made, photo(*size).resize(expected, Image.Resampling.LANCZOS)) < 5


def test_short_side_0_makes_none_smaller() -> None:
    file = saved(photo(900, 700))
    assert encode_image(file, 0, 90) == file


def test_a_thin_image_keeps_a_pixel() -> None:
    assert opened(encode_image(saved(photo(3, 700)), 2, 90)).size == (2, 467)
    assert opened(encode_image(saved(photo(700, 1), "PNG"), 0, 90)).size == (700, 1)


def test_quality_is_that_of_the_jpegs_that_are_made() -> None:
    file = saved(photo(300, 200), "PNG")
    sizes = [len(encode_image(file, 100, quality)) for quality in (20, 60, 95)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] / 2


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_is_rotated_upright_by_what_its_camera_says(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = saved(photo(60, 40), kind, exif=exif, quality=95)
    made = opened(encode_image(file, 100, 95))
    assert made.format == "JPEG"
    assert made.size == ((40, 60) if orientation >= 5 else (60, 40))
    assert made.getexif().get(ORIENTATION, 1) == 1
    assert off(made, ImageOps.exif_transpose(opened(file))) < 5


def test_a_rotated_image_is_made_smaller_by_the_side_that_is_short() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    assert opened(encode_image(saved(photo(600, 400), exif=exif), 50, 90)).size == (50, 75)


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_an_upright_image_with_notes_of_a_camera_stays_as_it_is(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = saved(photo(60, 40), exif=exif)
    assert encode_image(file, 40, 90) == file


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("notes", [b"Exif\0\0these are words", b"Exif\0\0II*\0\xff\xff\xff\0", b"Exif\0\0MM"])
def test_notes_of_a_camera_that_cannot_be_read_do_no_harm(notes: bytes) -> None:
    file = saved(photo(60, 40), exif=notes, dpi=(72, 72))
    assert encode_image(file, 40, 90) == file
    assert opened(encode_image(file, 20, 90)).size == (30, 20)


def test_cmyk_becomes_rgb() -> None:
    made = opened(encode_image(saved(photo(60, 40, "CMYK"), quality=95), 100, 95))
    assert (made.format, made.mode) == ("JPEG", "RGB")
    assert off(made, photo(60, 40)) < 5


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "BMP", "PPM", "TIFF"])
def test_other_formats_become_jpegs(kind: str) -> None:
    made = opened(encode_image(saved(photo(60, 40), kind), 100, 95))
    assert (made.format, made.mode) == ("JPEG", "RGB")
    assert off(made, photo(60, 40)) < 12


def test_what_shines_through_is_laid_on_white() -> None:
    picture = photo(60, 40, "RGBA")
    picture.paste((0, 0, 0, 0), (0, 0, 30, 40))
    made = np.asarray(opened(encode_image(saved(picture, "PNG"), 100, 95)))
    assert made[:, :24].min() > 240
    assert made[:, 36:].mean() < 160


def test_a_palette_with_a_colour_that_shines_through_is_laid_on_white() -> None:
    picture = Image.new("P", (40, 40))
    picture.putpalette([0, 0, 200, 0, 90, 0])
    made = opened(encode_image(saved(picture, "PNG", transparency=0), 100, 95))
    assert np.asarray(made).min() > 250


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bits_become_8_grey_ones(kind: str) -> None:
    grey = photo(60, 40, "L")
    picture = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 77)
    made = opened(encode_image(saved(picture, kind), 100, 95))
    assert (made.format, made.mode) == ("JPEG", "L")
    assert off(made, grey) < 3


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_numbers_of_an_unknown_range_are_refused(kind: type) -> None:
    picture = Image.fromarray(np.arange(12, dtype=kind).reshape(3, 4))
    with pytest.raises(DecodeError, match=r"of an unknown range; convert it to 8 or 16 bits"):
        encode_image(saved(picture, "TIFF"), 0, 90)


@pytest.mark.parametrize("mode", ["L", "1", "I;16"])
def test_what_was_grey_stays_grey_when_it_is_made_smaller(mode: str) -> None:
    assert opened(encode_image(saved(photo(60, 40, "L").convert(mode), "PNG"), 20, 90)).mode == "L"


def test_what_is_too_wide_for_a_jpeg_is_refused_with_its_size() -> None:
    file = saved(Image.new("LA", (65_501, 1)), "PNG")
    with pytest.raises(DecodeError, match="65501 x 1 pixels"):
        encode_image(file, 0, 90)


@pytest.mark.parametrize("file", BROKEN.values(), ids=BROKEN)
def test_what_is_no_image_is_refused(file: bytes) -> None:
    with pytest.raises(DecodeError):
        encode_image(file, 40, 90)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("side", [0, 20, 500])
@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_that_is_not_all_there_is_refused(kind: str, side: int, share: float) -> None:
    file = saved(photo(200, 150), kind)
    with pytest.raises(DecodeError):
        encode_image(file[: int(len(file) * share)], side, 90)


FILES = {kind: saved(photo(60, 40), kind) for kind in FORMATS} | {
    "grey": saved(photo(60, 40, "L")),
    "alpha": saved(photo(60, 40, "RGBA"), "PNG"),
    "palette": saved(photo(60, 40, "P"), "PNG"),
    "CMYK": saved(photo(60, 40, "CMYK")),
}

damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.sampled_from(sorted(FILES)), damage, st.booleans(), st.sampled_from([0, 20, 100]))
def test_a_damaged_image_is_refused_or_can_be_transformed(
    kind: str, damage: list[tuple[float, int]], early: bool, side: int
) -> None:
    """Nothing else is raised, now or when it is shown."""
    file = bytearray(FILES[kind])
    for place, value in damage:
        file[int(place * (min(200, len(file)) if early else len(file)))] = value
    try:
        made = encode_image(bytes(file), side, 90)
    except DecodeError:
        return
    for augment, rng in (("none", None), ("scale", Random(0))):
        options = ImageOptions(16, 3, (0.5,) * 3, (0.25,) * 3, augment)
        out = torch.full((16, 16, 3), torch.nan)
        ImageTransform(options, ImageDecoder(3)).into(out, memoryview(made), rng)
        assert out.abs().max() < 2.001  # of (0 to 1, less 0.5) / 0.25: each pixel is written, none from elsewhere
