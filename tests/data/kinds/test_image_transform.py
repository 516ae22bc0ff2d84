from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

from unisono.data.kinds import image_transform
from unisono.data.kinds.image import AUGMENTS, MEAN_SIDE, ImageOptions, choose_augmentation
from unisono.data.kinds.image_transform import ImageDecoder, ImageTransform, RawDecoder, shifted
from unisono.errors import DecodeError

Photo = Callable[..., Image.Image]
Encode = Callable[..., bytes]

VIEW = ImageOptions(32, 3, (0.5, 0.4, 0.3), (0.25, 0.2, 0.3))
GREY = ImageOptions(32, 1, (0.5,), (0.25,))


def shown(
    options: ImageOptions, file: bytes, seed: int | None = None, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """What `ImageTransform` makes of an image file, or of a raw image of this shape."""
    out = torch.full((options.size, options.size, options.channels), torch.nan)
    decoder = ImageDecoder(options.channels) if shape is None else RawDecoder(shape)
    ImageTransform(options, decoder).into(out, memoryview(bytearray(file)), None if seed is None else Random(seed))
    return out


def levels(options: ImageOptions, numbers: torch.Tensor) -> NDArray[np.float32]:
    """Back to 0 to 255."""
    return (255 * (numbers.float() * torch.tensor(options.std) + torch.tensor(options.mean))).numpy()


def naive(options: ImageOptions, pixels: NDArray[np.uint8], seed: int | None) -> NDArray[np.float32]:
    """From a whole image, in as simple steps as there are: 0 to 255."""
    how = choose_augmentation(options, pixels.shape[1], pixels.shape[0], None if seed is None else Random(seed))
    x, y, width, height = how.box
    part = torch.from_numpy(pixels[y : y + height, x : x + width].astype(np.float32)).permute(2, 0, 1)
    picture = interpolate(part[None], (options.size, options.size), mode="bilinear")[0]
    if how.mirrored:
        picture = picture.flip(2)
    return moved(picture.permute(1, 2, 0).numpy(), how.right, how.down)


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("seed", [None, *range(6)])
def test_of_the_mean_image_itself_nothing_is_left(augment: str, seed: int | None) -> None:
    """Whatever crop of it is taken, mirrored or moved; pixels that enter at the edge are at the mean."""
    y, x = np.mgrid[:MEAN_SIDE, :MEAN_SIDE] / MEAN_SIDE
    mean_image = np.stack([0.2 + 0.5 * x, 0.7 - 0.4 * y, 0.3 + 0.2 * x * y], axis=-1)
    large = cv2.resize(mean_image, (64, 64), interpolation=cv2.INTER_LINEAR)
    options = replace(VIEW, augment=augment, mean_image=tuple(mean_image.ravel().tolist()))
    left = shown(options, (255 * large).round().astype(np.uint8).tobytes(), seed, (64, 64, 3))
    torch.testing.assert_close(left, torch.zeros(32, 32, 3), rtol=0, atol=0.04)


@pytest.mark.parametrize("seed", [None, *range(4)])
def test_a_mean_image_of_one_color_is_the_mean_of_the_channels(photo: Photo, encode: Encode, seed: int | None) -> None:
    file, options = encode(photo(61, 47)), replace(VIEW, augment="crop")
    image = replace(options, mean=(0.0,) * 3, mean_image=VIEW.mean * MEAN_SIDE**2)
    torch.testing.assert_close(shown(image, file, seed), shown(options, file, seed))


def moved(picture: NDArray[np.float32], right: int, down: int) -> NDArray[np.float32]:
    """One pixel after the other."""
    out = np.zeros_like(picture)
    for y in range(picture.shape[0]):
        for x in range(picture.shape[1]):
            if 0 <= y - down < picture.shape[0] and 0 <= x - right < picture.shape[1]:
                out[y, x] = picture[y - down, x - right]
    return out


def pixels_of(file: bytes, mode: str = "RGB") -> NDArray[np.uint8]:
    pixels = np.array(Image.open(io.BytesIO(file)).convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("seed", [None, *range(6)])
@pytest.mark.parametrize("kind", ["4:4:4", "grey", "PNG"])
def test_transform_equals_simple_steps(photo: Photo, encode: Encode, kind: str, augment: str, seed: int | None) -> None:
    """Too small for a JPEG to be decoded at less than its size."""
    options = replace(VIEW, augment=augment)
    file = encode(photo(61, 47), kind)
    np.testing.assert_allclose(
        levels(options, shown(options, file, seed)), naive(options, pixels_of(file), seed), atol=2
    )


@given(
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0", "grey"]),
    st.integers(20, 500),
    st.integers(20, 500),
    st.integers(0, 999),
)
def test_transform_of_a_random_crop_is_close_to_simple_steps(
    photo: Photo, encode: Encode, kind: str, width: int, height: int, seed: int
) -> None:
    """A JPEG that is decoded at 1/2 to 1/8 begins up to a pixel of that beside the box."""
    options = replace(VIEW, augment="scale")
    file = encode(photo(width, height, max(60, width + height)), kind)
    off = np.abs(levels(options, shown(options, file, seed)) - naive(options, pixels_of(file), seed))
    assert off.mean() < 4
    assert off.max() < 24


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "grey"])
def test_where_decoding_gives_the_size_nothing_is_resized(photo: Photo, encode: Encode, kind: str, shrink: int) -> None:
    side = 32 * shrink
    file = encode(photo(side, side), kind)
    picture = Image.open(io.BytesIO(file))
    picture.draft(None, (32, 32))
    assert picture.size == (32, 32)
    np.testing.assert_allclose(levels(VIEW, shown(VIEW, file)), np.asarray(picture.convert("RGB")), atol=1.01)


@pytest.mark.parametrize("kind", ["4:4:4", "PNG"])
@pytest.mark.parametrize("times", [2, 3])
def test_what_is_far_too_large_is_resized_by_area_means(photo: Photo, encode: Encode, kind: str, times: int) -> None:
    """A JPEG, where it was decoded at 1/8."""
    shrink = 8 if kind == "4:4:4" else 1
    side = 32 * times * shrink
    picture = Image.open(io.BytesIO(encode(photo(side, side, 4 * side / 3), kind)))
    picture.draft(None, (side // shrink, side // shrink))
    pixels = np.asarray(picture, np.float32)
    assert len(pixels) == 32 * times
    means = pixels.reshape(32, times, 32, times, 3).mean(axis=(1, 3))
    resized = levels(VIEW, shown(VIEW, encode(photo(side, side, 4 * side / 3), kind)))
    np.testing.assert_allclose(resized, means, atol=1.01)


@pytest.mark.parametrize("kind", ["4:4:4", "4:2:0", "PNG"])
def test_grey_of_rgb_images(photo: Photo, encode: Encode, kind: str) -> None:
    file = encode(photo(50, 40), kind)
    np.testing.assert_allclose(levels(GREY, shown(GREY, file)), naive(GREY, pixels_of(file, "L"), None), atol=6)


@pytest.mark.parametrize("kind", ["grey", "PNG"])
def test_rgb_of_grey_images(photo: Photo, encode: Encode, kind: str) -> None:
    rgb = levels(VIEW, shown(VIEW, encode(photo(50, 40).convert("L"), kind)))
    assert rgb.std() > 30
    np.testing.assert_allclose(rgb[..., 1], rgb[..., 0], atol=0.01)
    np.testing.assert_allclose(rgb[..., 2], rgb[..., 0], atol=0.01)


@pytest.mark.parametrize("mode", ["CMYK", "RGBA", "P", "LA"])
def test_images_of_other_modes_are_transformed(photo: Photo, encode: Encode, mode: str) -> None:
    picture = photo(50, 40).convert(mode)
    file = encode(picture, "JPEG" if mode == "CMYK" else "PNG")
    assert np.abs(levels(VIEW, shown(VIEW, file)) - naive(VIEW, np.array(picture.convert("RGB")), None)).mean() < 5


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("size", [32, 24])
@pytest.mark.parametrize("shape", [(32, 32, 3), (40, 32, 3), (32, 32), (28, 28, 1)])
def test_raw_images_are_transformed(photo: Photo, shape: tuple[int, ...], size: int, augment: str) -> None:
    colors = shape[2] if len(shape) == 3 else 1
    options = replace(VIEW if colors == 3 else GREY, size=size, augment=augment)
    pixels = np.array(photo(shape[1], shape[0]).convert("RGB" if colors == 3 else "L")).reshape(*shape[:2], colors)
    for seed in (None, 1, 2, 3):
        result = levels(options, shown(options, pixels.tobytes(), seed, shape))
        np.testing.assert_allclose(result, naive(options, pixels, seed), atol=1.01)


def test_a_raw_image_of_its_own_size_is_normalised_alone(photo: Photo) -> None:
    pixels = np.array(photo(32, 32))
    expected = (pixels / 255 - np.array(VIEW.mean)) / np.array(VIEW.std)
    np.testing.assert_allclose(shown(VIEW, pixels.tobytes(), shape=(32, 32, 3)), expected, atol=1e-5)


@pytest.mark.parametrize("nbytes", [1, 5 * 4 * 32 * 3, 1 << 30], ids=["row by row", "5 rows at once", "all at once"])
def test_any_number_of_rows_at_once_gives_the_same_numbers(
    photo: Photo, encode: Encode, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = encode(photo(50, 40), "JPEG")
    expected, out = shown(VIEW, file), torch.empty((32, 32, 3))
    monkeypatch.setattr(image_transform, "BYTES_AT_ONCE", nbytes)
    ImageTransform(VIEW, ImageDecoder(3)).into(out, memoryview(file), None)
    assert torch.equal(out, expected)


def test_an_image_is_written_into_its_place_in_a_batch(photo: Photo, encode: Encode) -> None:
    batch = torch.zeros((3, 32, 32, 3))
    file = encode(photo(50, 40))
    ImageTransform(VIEW, ImageDecoder(3)).into(batch[1], memoryview(file), None)
    assert torch.equal(batch[1], shown(VIEW, file))
    assert not batch[0].any()
    assert not batch[2].any()


def test_a_transform_is_reusable(photo: Photo, encode: Encode) -> None:
    options = replace(VIEW, augment="scale")
    files = [
        encode(photo(300, 200), "4:2:0"),
        encode(photo(50, 40), "PNG"),
        encode(photo(33, 70), "grey"),
        encode(photo(64, 64).convert("CMYK"), "JPEG"),
    ]
    show, out = ImageTransform(options, ImageDecoder(3)), torch.empty((32, 32, 3))
    for seed, file in enumerate([*files, *reversed(files)]):
        show.into(out, memoryview(file), Random(seed))
        assert torch.equal(out, shown(options, file, seed))


def test_of_a_jpeg_that_ends_too_early_the_part_present_is_decoded(photo: Photo, encode: Encode) -> None:
    file = encode(photo(256, 256))
    full, partial = shown(VIEW, file), shown(VIEW, file[: len(file) // 2])
    assert torch.equal(partial[:12], full[:12])
    assert (partial[20:] - full[20:]).abs().mean() > 0.2


@pytest.mark.parametrize("file", [b"", b"\xff\xd8", b"these are words", bytes(3000)])
def test_what_is_no_image_is_refused(file: bytes) -> None:
    with pytest.raises(DecodeError):
        shown(VIEW, file)


@pytest.mark.parametrize("kind", ["4:2:0", "grey", "PNG"])
@pytest.mark.parametrize("size", [(32, 32), (50, 40)])
def test_nothing_is_warned_of(photo: Photo, encode: Encode, kind: str, size: tuple[int, int]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shown(VIEW, encode(photo(*size), kind))
    assert not caught


def test_without_libjpeg_turbo_the_result_is_about_the_same(
    photo: Photo, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(VIEW, augment="scale")
    file = encode(photo(300, 200, 400), "4:2:0")
    decoded = [levels(options, shown(options, file, seed)) for seed in range(5)]
    monkeypatch.setattr(image_transform, "turbojpeg", lambda: None)
    for seed in range(5):
        assert np.abs(decoded[seed] - levels(options, shown(options, file, seed))).mean() < 4


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_shifted_moves_pixels_and_black_comes_in(width: int, height: int, data: st.DataObject) -> None:
    right, down = data.draw(st.integers(-width, width)), data.draw(st.integers(-height, height))
    pixels = np.random.default_rng(0).integers(1, 256, (height, width, 3), np.uint8)
    np.testing.assert_array_equal(shifted(pixels, right, down), moved(pixels.astype(np.float32), right, down))
