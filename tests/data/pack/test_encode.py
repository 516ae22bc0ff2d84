from __future__ import annotations

import io
import wave
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from unisono.data.images.augmentation import ImageOptions
from unisono.data.images.transform import ImageTransform
from unisono.data.pack.encode import encode
from unisono.data.sources.source import AUDIO, IMAGE, RAW
from unisono.errors import DecodeError

ORIENTATION = 0x0112
BROKEN = {
    "empty": b"",
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


def sound(frames: int = 100, width: int = 2, channels: int = 1) -> bytes:
    """A wav file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(np.random.default_rng(0).bytes(frames * width * channels))
    return out.getvalue()


def off(found: Image.Image, expected: Image.Image) -> float:
    """Levels that two images differ by, in the mean."""
    assert found.size == expected.size
    return float(np.abs(np.asarray(found, np.int64) - np.asarray(expected, np.int64)).mean())


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("side", [0, 40, 64])
def test_a_jpeg_that_is_small_enough_stays_as_it_is(mode: str, side: int) -> None:
    file = saved(photo(60, 40, mode), quality=50, progressive=True)
    assert encode(IMAGE, file, side, 90) == file


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_a_png_that_is_small_enough_stays_as_it_is(mode: str) -> None:
    file = saved(photo(60, 40, mode), "PNG")
    assert encode(IMAGE, file, 40, 90) == file


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [((60, 40), 20, (30, 20)), ((40, 61), 20, (20, 30)), ((500, 301), 37, (61, 37)), ((41, 41), 40, (40, 40))],
)
def test_a_larger_image_is_made_so_that_its_short_side_is_as_wanted(
    kind: str, size: tuple[int, int], side: int, expected: tuple[int, int]
) -> None:
    made = opened(encode(IMAGE, saved(photo(*size), kind, quality=95), side, 95))
    assert made.format == "JPEG"
    assert made.size == expected
    assert off(made, photo(*size).resize(expected, Image.Resampling.LANCZOS)) < 5


def test_short_side_0_makes_none_smaller() -> None:
    file = saved(photo(900, 700))
    assert encode(IMAGE, file, 0, 90) == file


def test_a_thin_image_keeps_a_pixel() -> None:
    assert opened(encode(IMAGE, saved(photo(3, 700)), 2, 90)).size == (2, 467)
    assert opened(encode(IMAGE, saved(photo(700, 1), "PNG"), 0, 90)).size == (700, 1)


def test_quality_is_that_of_the_jpegs_that_are_made() -> None:
    file = saved(photo(300, 200), "PNG")
    sizes = [len(encode(IMAGE, file, 100, quality)) for quality in (20, 60, 95)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2] / 2


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_is_rotated_upright_by_what_its_camera_says(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = saved(photo(60, 40), kind, exif=exif, quality=95)
    made = opened(encode(IMAGE, file, 100, 95))
    assert made.format == "JPEG"
    assert made.size == ((40, 60) if orientation >= 5 else (60, 40))
    assert made.getexif().get(ORIENTATION, 1) == 1
    assert off(made, ImageOps.exif_transpose(opened(file))) < 5


def test_a_rotated_image_is_made_smaller_by_the_side_that_is_short() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    assert opened(encode(IMAGE, saved(photo(600, 400), exif=exif), 50, 90)).size == (50, 75)


@pytest.mark.parametrize("orientation", [0, 1, 9])
def test_an_upright_image_with_notes_of_a_camera_stays_as_it_is(orientation: int) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = saved(photo(60, 40), exif=exif)
    assert encode(IMAGE, file, 40, 90) == file


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("notes", [b"Exif\0\0these are words", b"Exif\0\0II*\0\xff\xff\xff\0", b"Exif\0\0MM"])
def test_notes_of_a_camera_that_cannot_be_read_do_no_harm(notes: bytes) -> None:
    file = saved(photo(60, 40), exif=notes, dpi=(72, 72))
    assert encode(IMAGE, file, 40, 90) == file
    assert opened(encode(IMAGE, file, 20, 90)).size == (30, 20)


def test_cmyk_becomes_rgb() -> None:
    made = opened(encode(IMAGE, saved(photo(60, 40, "CMYK"), quality=95), 100, 95))
    assert (made.format, made.mode) == ("JPEG", "RGB")
    assert off(made, photo(60, 40)) < 5


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "BMP", "PPM", "TIFF"])
def test_other_formats_become_jpegs(kind: str) -> None:
    made = opened(encode(IMAGE, saved(photo(60, 40), kind), 100, 95))
    assert (made.format, made.mode) == ("JPEG", "RGB")
    assert off(made, photo(60, 40)) < 12


def test_what_shines_through_is_laid_on_white() -> None:
    picture = photo(60, 40, "RGBA")
    picture.paste((0, 0, 0, 0), (0, 0, 30, 40))
    made = np.asarray(opened(encode(IMAGE, saved(picture, "PNG"), 100, 95)))
    assert made[:, :24].min() > 240
    assert made[:, 36:].mean() < 160


def test_a_palette_with_a_colour_that_shines_through_is_laid_on_white() -> None:
    picture = Image.new("P", (40, 40))
    picture.putpalette([0, 0, 200, 0, 90, 0])
    made = opened(encode(IMAGE, saved(picture, "PNG", transparency=0), 100, 95))
    assert np.asarray(made).min() > 250


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bits_become_8_grey_ones(kind: str) -> None:
    grey = photo(60, 40, "L")
    picture = Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 77)
    made = opened(encode(IMAGE, saved(picture, kind), 100, 95))
    assert (made.format, made.mode) == ("JPEG", "L")
    assert off(made, grey) < 3


@pytest.mark.parametrize("mode", ["L", "1", "I;16"])
def test_what_was_grey_stays_grey_when_it_is_made_smaller(mode: str) -> None:
    assert opened(encode(IMAGE, saved(photo(60, 40, "L").convert(mode), "PNG"), 20, 90)).mode == "L"


def test_what_is_too_wide_for_a_jpeg_is_refused_with_its_size() -> None:
    file = saved(Image.new("LA", (65_501, 1)), "PNG")
    with pytest.raises(DecodeError, match="65501 x 1 pixels"):
        encode(IMAGE, file, 0, 90)


@pytest.mark.parametrize("file", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("kind", [IMAGE, AUDIO])
def test_what_is_empty_or_nothing_known_is_refused(kind: str, file: bytes) -> None:
    with pytest.raises(DecodeError, match=None if file else "empty"):
        encode(kind, file, 40, 90)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("side", [0, 20, 500])
@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_that_is_not_all_there_is_refused(kind: str, side: int, share: float) -> None:
    file = saved(photo(200, 150), kind)
    with pytest.raises(DecodeError):
        encode(IMAGE, file[: int(len(file) * share)], side, 90)


def test_raw_samples_stay_as_they_are() -> None:
    assert encode(RAW, b"\0\1\2", 1, 90) == b"\0\1\2"
    with pytest.raises(DecodeError, match="empty"):
        encode(RAW, b"", 1, 90)


@pytest.mark.parametrize("channels", [1, 2])
def test_an_audio_file_stays_as_it_is(channels: int) -> None:
    file = sound(channels=channels)
    assert encode(AUDIO, file, 40, 90) == file


@pytest.mark.parametrize("width", [1, 3, 4])
def test_an_audio_file_of_other_than_16_bits_is_refused(width: int) -> None:
    with pytest.raises(DecodeError, match=f"{8 * width} bits"):
        encode(AUDIO, sound(width=width), 40, 90)


@pytest.mark.parametrize("left", [44, 45, 100, 243])
def test_an_audio_file_that_is_not_all_there_is_refused_with_what_there_is(left: int) -> None:
    with pytest.raises(DecodeError, match="of 200 bytes of audio"):
        encode(AUDIO, sound()[:left], 40, 90)


def test_an_audio_file_of_no_length_is_refused() -> None:
    with pytest.raises(DecodeError, match="0 of 0"):
        encode(AUDIO, sound(0), 40, 90)


@pytest.mark.parametrize("left", [4, 12, 30, 40])
def test_the_beginning_of_an_audio_file_is_no_audio_file(left: int) -> None:
    with pytest.raises(DecodeError, match="no wav file"):
        encode(AUDIO, sound()[:left], 40, 90)


def test_an_audio_file_whose_parts_end_outside_it_is_refused() -> None:
    file = bytearray(sound())
    file[19] = 1
    with pytest.raises(DecodeError, match="no wav file"):
        encode(AUDIO, bytes(file), 40, 90)


def test_an_audio_file_of_fractions_is_refused() -> None:
    file = bytearray(sound())
    file[20] = 3
    with pytest.raises(DecodeError, match="no wav file"):
        encode(AUDIO, bytes(file), 40, 90)


FILES = {kind: saved(photo(60, 40), kind) for kind in FORMATS} | {
    "grey": saved(photo(60, 40, "L")),
    "alpha": saved(photo(60, 40, "RGBA"), "PNG"),
    "palette": saved(photo(60, 40, "P"), "PNG"),
    "CMYK": saved(photo(60, 40, "CMYK")),
}

damage = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FILES)), damage, st.booleans(), st.sampled_from([0, 20, 100]))
def test_a_damaged_image_is_refused_or_can_be_transformed(
    kind: str, damage: list[tuple[float, int]], early: bool, side: int
) -> None:
    """Nothing else is raised, now or when it is shown."""
    file = bytearray(FILES[kind])
    for place, value in damage:
        file[int(place * (min(200, len(file)) if early else len(file)))] = value
    try:
        made = encode(IMAGE, bytes(file), side, 90)
    except DecodeError:
        return
    for augment, rng in (("none", None), ("scale", Random(0))):
        options = ImageOptions(16, 3, (0.5,) * 3, (0.25,) * 3, augment)
        ImageTransform(options).into(torch.empty((16, 16, 3)), memoryview(made), rng)


@settings(max_examples=100, deadline=None)
@given(damage, st.booleans())
def test_a_damaged_audio_file_is_refused_or_stays_as_it_is(damage: list[tuple[float, int]], early: bool) -> None:
    file = bytearray(sound())
    for place, value in damage:
        file[int(place * (44 if early else len(file)))] = value
    try:
        assert encode(AUDIO, bytes(file), 40, 90) == bytes(file)
    except DecodeError:
        return
