from __future__ import annotations

import io
from collections.abc import Callable
from ctypes.util import find_library

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from unisono.data.kinds import image_transform
from unisono.data.kinds.image import ImageHeader, Part
from unisono.data.kinds.image_transform import JpegDecoder
from unisono.errors import DecodeError

Photo = Callable[..., Image.Image]
Encode = Callable[..., bytes]

needs_library = pytest.mark.skipif(image_transform.turbojpeg() is None, reason="there is no libjpeg-turbo 3")

BLOCKS = {"4:4:4": 8, "4:2:2": 16, "4:2:0": 16, "grey": 8}


def by_pillow(file: bytes, shrink: int) -> NDArray[np.uint8]:
    """The whole image at 1 / shrink."""
    picture = Image.open(io.BytesIO(file))
    width, height = picture.size
    picture.draft(None, (width // shrink, height // shrink))
    assert picture.size == (-(-width // shrink), -(-height // shrink)), "it is at the scale that was asked for"
    pixels = np.asarray(picture)
    return pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, axis=2)


def cut(pixels: NDArray[np.uint8], part: Part) -> NDArray[np.int64]:
    return pixels[part.y : part.y + part.height, part.x : part.x + part.width].astype(np.int64)


def agree(pixels: NDArray[np.uint8], expected: NDArray[np.int64]) -> bool:
    """A level off at most; at the left and right edges colours are made without their neighbours."""
    off = np.abs(pixels.astype(np.int64) - expected)
    return pixels.shape == expected.shape and off[:, 1:-1].max(initial=0) <= 1 and off.max(initial=0) <= 24


def version_3(file: bytes) -> bytes:
    """Says that it is of JFIF 3, which there is not."""
    assert file[6:11] == b"JFIF\0"
    return file[:11] + b"\3" + file[12:]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, Part]:
    """Colours and size of an image, and a part of it that can be decoded."""
    colors = draw(st.sampled_from(sorted(BLOCKS)))
    width, height, shrink = draw(st.integers(8, 150)), draw(st.integers(8, 150)), draw(st.sampled_from([1, 2, 4, 8]))
    right, bottom, step = -(-width // shrink), -(-height // shrink), BLOCKS[colors] // shrink
    x, y = draw(st.integers(0, (right - 1) // step)) * step, draw(st.integers(0, bottom - 1))
    return colors, width, height, Part(x, y, draw(st.integers(1, right - x)), draw(st.integers(1, bottom - y)), shrink)


@needs_library
@pytest.mark.parametrize("colors", BLOCKS)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 90), (64, 48), (131, 77)])
def test_the_header_tells_the_size_and_the_blocks_at_which_parts_can_begin(
    photo: Photo, encode: Encode, colors: str, width: int, height: int
) -> None:
    header = JpegDecoder().header(encode(photo(width, height), colors))
    assert header == ImageHeader(width, height, BLOCKS[colors])


@needs_library
@given(cases(), st.booleans())
def test_a_part_is_what_pillow_decodes_there_at_that_scale(
    photo: Photo, encode: Encode, case: tuple[str, int, int, Part], progressive: bool
) -> None:
    colors, width, height, part = case
    file = encode(photo(width, height, 100), colors, progressive=progressive)
    decoder = JpegDecoder()
    decoder.header(file)
    assert agree(decoder.decode(file, part, False), cut(by_pillow(file, part.shrink), part))


@needs_library
@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("colors", BLOCKS)
def test_the_whole_is_what_pillow_decodes(photo: Photo, encode: Encode, colors: str, shrink: int) -> None:
    file = encode(photo(203, 117), colors)
    decoder = JpegDecoder()
    decoder.header(file)
    expected = by_pillow(file, shrink)
    pixels = decoder.decode(file, Part(0, 0, expected.shape[1], expected.shape[0], shrink), False)
    np.testing.assert_allclose(pixels.astype(int), expected.astype(int), atol=1)


@needs_library
@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("colors", BLOCKS)
def test_a_part_can_be_wanted_in_grey(photo: Photo, encode: Encode, colors: str, shrink: int) -> None:
    file = encode(photo(203, 117), colors)
    decoder = JpegDecoder()
    decoder.header(file)
    part = Part(16, 3, 8, 10, shrink)
    pixels = decoder.decode(file, part, True)
    assert pixels.shape == (10, 8, 1)
    grey = np.asarray(Image.fromarray(by_pillow(file, shrink)).convert("L"))
    np.testing.assert_allclose(pixels[..., 0].astype(int), cut(grey, part), atol=6)
    assert pixels.std() > 5


@needs_library
def test_a_decoder_keeps_nothing_of_the_image_before(photo: Photo, encode: Encode) -> None:
    files = [
        (encode(photo(300, 200), "4:2:0"), Part(16, 5, 30, 40, 4), False),
        (encode(photo(40, 30), "4:4:4"), Part(0, 0, 40, 30, 1), False),
        (encode(photo(500, 90), "grey"), Part(8, 1, 9, 9, 8), True),
        (encode(photo(90, 500), "4:2:2"), Part(16, 100, 20, 150, 2), False),
    ]
    decoder = JpegDecoder()
    for file, part, grey in [*files, *reversed(files)]:
        fresh = JpegDecoder()
        decoder.header(file)
        fresh.header(file)
        np.testing.assert_array_equal(decoder.decode(file, part, grey), fresh.decode(file, part, grey))


@needs_library
def test_a_file_in_cmyk_has_no_header_here(photo: Photo, encode: Encode) -> None:
    assert JpegDecoder().header(encode(photo(40, 30).convert("CMYK"), "JPEG")) is None


@needs_library
def test_a_file_of_unusual_blocks_has_no_header_here(photo: Photo, encode: Encode) -> None:
    file = bytearray(encode(photo(40, 30), "4:4:4"))
    frame = file.index(b"\xff\xc0")
    assert file[frame + 11] == 0x11
    file[frame + 11] = 0x31
    assert JpegDecoder().header(bytes(file)) is None


@needs_library
@pytest.mark.parametrize("file", [b"", b"no picture at all", b"\x89PNG\r\n\x1a\n", bytes(1000)])
def test_what_is_no_jpeg_is_refused(file: bytes) -> None:
    with pytest.raises(DecodeError):
        JpegDecoder().header(file)


@needs_library
def test_a_file_with_an_oddity_in_its_header_has_no_header_here(photo: Photo, encode: Encode) -> None:
    """A version of JFIF that is not known."""
    assert JpegDecoder().header(version_3(encode(photo(40, 30)))) is None


@needs_library
def test_of_a_file_that_ends_too_early_the_part_present_is_decoded(photo: Photo, encode: Encode) -> None:
    file = encode(photo(64, 512))
    decoder, part = JpegDecoder(), Part(0, 0, 64, 512, 1)
    decoder.header(file)
    full = decoder.decode(file, part, False)
    decoder.header(file[: len(file) // 2])
    partial = decoder.decode(file[: len(file) // 2], part, False)
    np.testing.assert_array_equal(partial[:200], full[:200])
    assert np.abs(partial[-100:].astype(int) - full[-100:]).mean() > 20


@needs_library
@pytest.mark.parametrize("part", [Part(3, 0, 8, 8, 1), Part(0, 0, 80, 8, 1), Part(0, 40, 8, 8, 1), Part(0, 0, 8, 8, 3)])
def test_a_part_that_cannot_be_decoded_is_refused(photo: Photo, encode: Encode, part: Part) -> None:
    file = encode(photo(40, 30))
    decoder = JpegDecoder()
    decoder.header(file)
    with pytest.raises(DecodeError):
        decoder.decode(file, part, False)


def test_without_the_library_the_error_tells_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_transform, "turbojpeg", lambda: None)
    with pytest.raises(DecodeError, match="pip install turbojpeg"):
        JpegDecoder()


def test_an_older_library_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for by libraries that do not exist, or do something else."""
    monkeypatch.setattr(image_transform, "_paths", lambda: ["/there/is/no/library.so", find_library("c") or "libc"])
    assert image_transform.turbojpeg.__wrapped__() is None
