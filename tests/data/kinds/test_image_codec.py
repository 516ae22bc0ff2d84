from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from unisono.data.kinds import image_transform
from unisono.data.kinds.image import Box, ImageHeader, middle
from unisono.data.kinds.image_codec import decode_image, encode_image, pixels_of, upright
from unisono.data.kinds.image_transform import ImageDecoder, RawDecoder
from unisono.errors import DecodeError

Photo = Callable[..., Image.Image]
Encode = Callable[..., bytes]

ORIENTATION = 0x0112
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera that was held so lays down what it saw."""

BROKEN = {
    "empty": b"",
    "words": b"these are words",
    "zeros": bytes(2000),
    "start": b"\xff\xd8",
    "png": b"\x89PNG\r\n\x1a\n",
}


def turned(picture: Image.Image, orientation: int, encode: Encode, kind: str) -> bytes:
    """The file of a camera that was held so."""
    how = STORED[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode(picture if how is None else picture.transpose(how), kind, exif=exif)


def test_read_any_does_not_change_what_needs_no_change(photo: Photo, encode: Encode) -> None:
    picture = photo(40, 30)
    np.testing.assert_array_equal(decode_image(encode(picture, "PNG")), picture)


@pytest.mark.parametrize("orientation", STORED)
def test_an_image_is_rotated_as_its_camera_says(photo: Photo, encode: Encode, orientation: int) -> None:
    picture = photo(40, 30)
    file = turned(picture, orientation, encode, "PNG")
    as_stored = decode_image(file)
    np.testing.assert_array_equal(upright(as_stored), picture)
    assert as_stored.size == ((30, 40) if orientation >= 5 else (40, 30))
    assert orientation == 1 or not np.array_equal(as_stored, picture)


@settings(max_examples=30)
@given(st.integers(1, 400), st.sampled_from(["4:2:0", "grey"]))
def test_a_jpeg_comes_smaller_where_enough_of_it_is_left(
    photo: Photo, encode: Encode, min_side: int, kind: str
) -> None:
    file = encode(photo(301, 203, 600), kind)
    image = decode_image(file, min_side=min_side)
    shrink = max(each for each in (1, 2, 4, 8) if each == 1 or each * min_side <= 203)
    assert image.size == (-(-301 // shrink), -(-203 // shrink))
    expected = np.asarray(decode_image(file).resize(image.size, Image.Resampling.BOX), np.int64)
    assert np.abs(np.asarray(image, np.int64) - expected).mean() < 4


def test_other_kinds_never_come_smaller(photo: Photo, encode: Encode) -> None:
    assert decode_image(encode(photo(301, 203), "PNG"), min_side=10).size == (301, 203)


@pytest.mark.parametrize("file", BROKEN.values(), ids=BROKEN)
def test_what_is_no_image_is_refused_in_a_line(file: bytes) -> None:
    with pytest.raises(DecodeError) as error:
        decode_image(file)
    assert str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not features.check("avif"), reason="Pillow without AVIF")
def test_an_avif_with_a_damaged_byte_is_decoded_or_refused(photo: Photo, encode: Encode) -> None:
    file = encode(photo(64, 48), "AVIF")
    for place in range(len(file) // 4, len(file) // 2):
        damaged = bytearray(file)
        damaged[place] ^= 0xFF
        with suppress(DecodeError):
            decode_image(bytes(damaged))


@pytest.mark.parametrize("kind", ["4:4:4", "grey", "PNG", "GIF", "WEBP", "BMP", "PPM", "TIFF"])
def test_an_image_that_is_not_all_there_is_refused(photo: Photo, encode: Encode, kind: str) -> None:
    file = encode(photo(200, 150), kind)
    decode_image(file)
    with pytest.raises(DecodeError):
        decode_image(file[: len(file) // 2])


def test_notes_of_a_camera_that_cannot_be_read_do_no_harm(photo: Photo, encode: Encode) -> None:
    file = encode(photo(40, 30), exif=b"Exif\0\0these are words", dpi=(72, 72))
    assert upright(decode_image(file)).size == (40, 30)


def test_pixels_are_in_rgb_or_grey(photo: Photo) -> None:
    picture = photo(40, 30)
    np.testing.assert_array_equal(pixels_of(picture, "RGB"), picture)
    np.testing.assert_array_equal(pixels_of(picture, "L"), np.asarray(picture.convert("L"))[..., None])
    grey = picture.convert("L")
    np.testing.assert_array_equal(pixels_of(grey, "RGB"), np.stack([np.asarray(grey)] * 3, axis=-1))


def test_pixels_can_be_written_into(photo: Photo) -> None:
    """As PyTorch wants of the memory it is given."""
    for mode in ("RGB", "L"):
        assert pixels_of(photo(40, 30), mode).flags.writeable


def test_what_shines_through_is_laid_on_white() -> None:
    picture = Image.new("RGBA", (3, 1))
    picture.putdata([(10, 20, 30, 255), (10, 20, 30, 0), (0, 100, 200, 51)])
    expected = [[[10, 20, 30], [255, 255, 255], [204, 224, 244]]]
    np.testing.assert_allclose(pixels_of(picture, "RGB").astype(int), expected, atol=1)
    grey = Image.new("LA", (2, 1))
    grey.putdata([(100, 255), (0, 0)])
    assert pixels_of(grey, "L").tolist() == [[[100], [255]]]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_palette_with_a_colour_that_shines_through_is_laid_on_white(encode: Encode, kind: str) -> None:
    picture = Image.new("P", (3, 1))
    picture.putpalette([200, 0, 0, 0, 0, 200, 0, 90, 0])
    picture.putdata([0, 1, 2])
    plain, clear = encode(picture, kind), encode(picture, kind, transparency=1)
    assert pixels_of(decode_image(plain), "RGB").tolist() == [[[200, 0, 0], [0, 0, 200], [0, 90, 0]]]
    assert pixels_of(decode_image(clear), "RGB").tolist() == [[[200, 0, 0], [255, 255, 255], [0, 90, 0]]]


def test_of_16_bits_the_upper_8_are_taken(encode: Encode) -> None:
    picture = Image.fromarray(np.array([[0, 255, 256, 32768, 65535]], np.uint16))
    for kind in ("PNG", "TIFF", "PPM"):
        assert pixels_of(decode_image(encode(picture, kind)), "L").ravel().tolist() == [0, 0, 1, 128, 255], kind


def test_16_bits_with_the_upper_byte_first_are_grey(encode: Encode) -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], ">u2")
    file = encode(Image.frombytes("I;16B", (5, 1), values.tobytes()), "TIFF")
    assert decode_image(file).mode == "I;16B"
    packed = decode_image(encode_image(file, 0, 100))
    assert (packed.mode, np.asarray(packed)[0, -1]) == ("L", 255)


def test_of_16_bits_with_a_value_that_shines_through_the_upper_8_are_taken(encode: Encode) -> None:
    picture = Image.fromarray(np.array([[0, 256, 32768, 65535]], np.uint16))
    pixels = pixels_of(decode_image(encode(picture, "PNG", transparency=0)), "L")
    assert pixels.ravel().tolist() == [255, 1, 128, 255]


def test_black_and_white_is_black_and_white(encode: Encode) -> None:
    picture = Image.fromarray(np.array([[True, False, True]]))
    assert pixels_of(decode_image(encode(picture, "PNG")), "RGB")[0, :, 1].tolist() == [255, 0, 255]


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "grey", "PNG"])
@pytest.mark.parametrize("colors", [1, 3])
def test_a_decoder_decodes_the_crop(photo: Photo, encode: Encode, kind: str, colors: int) -> None:
    file, decoder = encode(photo(160, 120), kind), ImageDecoder(colors)
    assert decoder.header(file)[:2] == (160, 120)
    crop = decoder.decode(Box(37, 21, 60, 50), 40)
    assert crop.shape == (50, 60, colors)
    full = pixels_of(decode_image(file), "RGB" if colors == 3 else "L")
    off = np.abs(crop.astype(int) - full[21:71, 37:97])
    assert off.mean() < 2
    assert off[:, 1:-1].max() <= 6


def test_a_decoder_decodes_no_more_of_a_jpeg_than_is_needed(photo: Photo, encode: Encode) -> None:
    decoder = ImageDecoder(3)
    decoder.header(encode(photo(640, 480)))
    crop = decoder.decode(middle(640, 480), 64)
    assert (crop.shape, crop.base.shape[1] <= 107) == ((105, 105, 3), True)


@pytest.mark.parametrize("kind", ["4:2:0", "PNG"])
def test_an_image_is_decoded_as_it_is_stored(photo: Photo, encode: Encode, kind: str) -> None:
    """Packs hold images that were rotated already."""
    file, decoder = turned(photo(40, 30), 6, encode, kind), ImageDecoder(3)
    assert decoder.header(file)[:2] == (30, 40)
    pixels = decoder.decode(Box(0, 0, 30, 40), 30)
    stored = np.asarray(photo(40, 30).transpose(Image.Transpose.ROTATE_90), np.int64)
    assert np.abs(pixels - stored).mean() < 4


@pytest.mark.parametrize("kind", ["4:2:0", "PNG"])
def test_a_header_needs_the_beginning_of_a_file_alone(photo: Photo, encode: Encode, kind: str) -> None:
    assert ImageDecoder(3).header(encode(photo(200, 150), kind)[:700])[:2] == (200, 150)


@pytest.mark.parametrize("kind", ["4:2:0", "grey"])
def test_without_libjpeg_turbo_a_jpeg_is_decoded_by_pillow(
    photo: Photo, encode: Encode, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = encode(photo(160, 120), kind)
    monkeypatch.setattr(image_transform, "turbojpeg", lambda: None)
    assert_decoded_whole(file, np.asarray(decode_image(file).convert("RGB")))


def assert_decoded_whole(file: bytes, expected: np.ndarray, atol: int = 0) -> None:
    """By Pillow, of which the crop is cut: as far from what is expected, in the mean, as `atol`."""
    decoder, (height, width) = ImageDecoder(3), expected.shape[:2]
    assert decoder.header(file) == ImageHeader(width, height, None)
    x, y, wide, high = box = middle(width, height)
    off = np.abs(decoder.decode(box, 16).astype(int) - expected[y : y + high, x : x + wide])
    assert off.mean() <= atol


def test_cmyk_is_decoded_by_pillow(photo: Photo, encode: Encode) -> None:
    picture = photo(64, 48)
    assert_decoded_whole(encode(picture.convert("CMYK"), "JPEG", quality=95), np.asarray(picture), 4)


def test_a_jpeg_whose_header_libjpeg_turbo_warns_of_is_decoded_by_pillow(photo: Photo, encode: Encode) -> None:
    """A version of JFIF that is not known."""
    file = bytearray(encode(photo(64, 48)))
    assert file[6:11] == b"JFIF\0"
    file[11] = 3
    assert_decoded_whole(bytes(file), np.asarray(decode_image(bytes(file))))


def test_blocks_of_an_unusual_shape_are_decoded(encode: Encode) -> None:
    """Two blocks across in each colour. All blocks are alike, so that their new order does no harm."""
    file = bytearray(encode(Image.new("RGB", (64, 64), (128, 128, 128)), "4:4:4", optimize=True))
    frame = file.index(b"\xff\xc0")
    for color in range(3):
        file[frame + 11 + 3 * color] = 0x21
    expected = np.asarray(Image.open(io.BytesIO(file)))
    for x in (0, 9, 23):
        decoder = ImageDecoder(3)
        decoder.header(bytes(file))
        crop = decoder.decode(Box(x, 0, 40, 40), 40)
        np.testing.assert_allclose(crop.astype(int), expected[:40, x : x + 40].astype(int), atol=1)


def test_a_decoder_decodes_the_image_whose_header_was_read_last(photo: Photo, encode: Encode) -> None:
    decoder = ImageDecoder(3)
    files = [encode(photo(64, 48), kind) for kind in ("4:2:0", "PNG", "4:4:4")]
    for file in [*files, *reversed(files)]:
        fresh, box = ImageDecoder(3), Box(3, 5, 30, 40)
        assert decoder.header(file) == fresh.header(file)
        np.testing.assert_array_equal(decoder.decode(box, 16), fresh.decode(box, 16))


@pytest.mark.parametrize("file", BROKEN.values(), ids=BROKEN)
def test_what_is_no_image_is_refused(file: bytes) -> None:
    decoder = ImageDecoder(3)
    with pytest.raises(DecodeError):
        decoder.decode(middle(*decoder.header(file)[:2]), 16)


def test_an_image_of_another_size_than_its_header_is_refused(
    photo: Photo, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = ImageDecoder(3)
    decoder.header(encode(photo(40, 30), "PNG"))
    monkeypatch.setattr(image_transform, "decode_image", lambda file: photo(20, 30))
    with pytest.raises(DecodeError, match="header says 40 x 30 pixels, but it has 20 x 30"):
        decoder.decode(Box(0, 0, 40, 30), 8)


@pytest.mark.parametrize("shape", [(6, 9), (6, 9, 1), (6, 9, 3)])
def test_raw_images_have_one_header_and_are_cut(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoder = RawDecoder(shape)
    assert decoder.header(memoryview(pixels.tobytes())) == ImageHeader(9, 6, None)
    np.testing.assert_array_equal(decoder.decode(Box(2, 1, 4, 3), 1), pixels.reshape(6, 9, -1)[1:4, 2:6])
