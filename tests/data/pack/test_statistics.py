from __future__ import annotations

import io
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from unisono.data.kinds import AUDIO, IMAGE, RAW
from unisono.data.pack import packing as module
from unisono.data.pack.index import About, Index
from unisono.data.pack.packing import PackOptions, pack, statistics
from unisono.data.sources import Source
from unisono.errors import PackError


def packed(folder: Path, kind: str, samples: list[bytes], shape: tuple[int, ...] | None = None) -> Index:
    """The index of a pack, without mean and deviation."""
    keys = [str(key) for key in range(len(samples))]
    sizes = np.array([len(sample) for sample in samples])
    source = Source(kind, ("a",), keys, np.zeros(len(samples), np.int64), sizes, samples.__getitem__, shape)
    index = pack(source, folder, PackOptions(short_side=0, stripes=3), 1, lambda: None)
    return replace(index, about=replace(index.about, mean=(), std=()))


def naive(image_samples: list[NDArray[np.uint8]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and std of each colour, where every picture counts the same."""
    colors = [picture.reshape(-1, picture.shape[-1]) / 255 for picture in image_samples]
    mean = np.mean([each.mean(axis=0) for each in colors], axis=0)
    squares = np.mean([(each**2).mean(axis=0) for each in colors], axis=0)
    return mean, np.sqrt(squares - mean**2)


def noise(count: int, shape: tuple[int, ...]) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40 + 5 * image, shape).astype(np.uint8) for image in range(count)]


def encode(picture: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, quality=95)
    return out.getvalue()


@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 5), (4, 4, 1)])
def test_mean_and_std_of_raw_images_are_those_of_the_formula(tmp_path: Path, shape: tuple[int, ...]) -> None:
    image_samples = noise(23, shape)
    about = statistics(packed(tmp_path / "pack", RAW, [picture.tobytes() for picture in image_samples], shape)).about
    mean, std = naive([picture.reshape(*shape[:2], -1) for picture in image_samples])
    assert about.mean == pytest.approx(mean)
    assert about.std == pytest.approx(std)


@pytest.mark.parametrize("shape", [(32, 32, 3), (32, 32), (64, 96, 3)])
def test_the_mean_image_is_that_of_all_images_stretched_to_one_size(tmp_path: Path, shape: tuple[int, ...]) -> None:
    image_samples = noise(7, shape)
    about = statistics(packed(tmp_path / "pack", RAW, [picture.tobytes() for picture in image_samples], shape)).about
    down, across = shape[0] // 32, shape[1] // 32
    blocks = np.mean(image_samples, axis=0).reshape(32, down, 32, across, -1).mean(axis=(1, 3)) / 255
    assert np.array(about.mean_image).reshape(blocks.shape) == pytest.approx(blocks, abs=0.002)


def test_each_image_counts_the_same_whatever_its_size(tmp_path: Path) -> None:
    image_samples = [Image.new("RGB", (40, 40), (255, 0, 0)), Image.new("RGB", (10, 10), (0, 0, 51))]
    about = statistics(packed(tmp_path / "pack", IMAGE, [encode(picture, "PNG") for picture in image_samples])).about
    assert about.mean == pytest.approx((0.5, 0, 0.1))
    assert about.std == pytest.approx((0.5, 1e-4, 0.1))


def test_large_jpegs_are_decoded_smaller(tmp_path: Path) -> None:
    y, x = np.mgrid[:300, :400]
    image_samples = [
        np.stack([np.sin(x / 30 + n) * 100 + 128, y / 2 + n, x / 2], -1).astype(np.uint8) for n in range(3)
    ]
    files = [encode(Image.fromarray(picture), "JPEG") for picture in image_samples]
    about = statistics(packed(tmp_path / "pack", IMAGE, files)).about
    mean, std = naive(image_samples)
    assert about.mean == pytest.approx(mean, abs=0.005)
    assert about.std == pytest.approx(std, abs=0.005)


@pytest.mark.parametrize("mode", ["L", "1"])
def test_grey_images_have_one_channel(tmp_path: Path, mode: str) -> None:
    image_samples = [Image.fromarray(picture).convert(mode) for picture in noise(3, (8, 8))]
    about = statistics(packed(tmp_path / "pack", IMAGE, [encode(picture, "PNG") for picture in image_samples])).about
    mean, std = naive([np.asarray(picture.convert("L"))[..., None] for picture in image_samples])
    assert about.mean == pytest.approx(mean)
    assert about.std == pytest.approx(std)
    assert len(about.mean) == 1


@pytest.mark.parametrize("grey", [0, 1])
def test_where_an_image_has_channels_all_have(tmp_path: Path, grey: int) -> None:
    image_samples = [Image.new("RGB", (4, 4), (255, 51, 0))]
    image_samples.insert(grey, Image.new("L", (4, 4), 102))
    about = statistics(packed(tmp_path / "pack", IMAGE, [encode(picture, "PNG") for picture in image_samples])).about
    assert about.mean == pytest.approx((0.7, 0.3, 0.2))
    assert about.std == pytest.approx((0.3, 0.1, 0.2))


def test_rgb_images_outside_the_measured_ones_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and std are those of the grey images that were looked at."""
    monkeypatch.setattr(module, "MEASURED_IMAGES", 10)
    image_samples = [Image.new("L", (2, 2), 51)] * 39 + [Image.new("RGB", (2, 2), (255, 0, 0))]
    about = statistics(packed(tmp_path / "pack", IMAGE, [encode(picture, "PNG") for picture in image_samples])).about
    assert about.mean == pytest.approx((0.2, 0.2, 0.2))


def test_images_of_one_shade_still_can_be_divided_by_their_std(tmp_path: Path) -> None:
    about = statistics(packed(tmp_path / "pack", RAW, [bytes([51] * 4)] * 3, (2, 2))).about
    assert about.mean == pytest.approx((0.2,))
    assert about.std == pytest.approx((1e-4,))


def test_measured_images_are_evenly_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 of 100: 10 from each half."""
    monkeypatch.setattr(module, "MEASURED_IMAGES", 20)
    index = packed(tmp_path / "pack", RAW, [bytes([level]) for level in range(100)], (1, 1))
    looked_at = [*range(10), *range(50, 60)]
    assert statistics(index).about.mean == pytest.approx((np.mean(looked_at) / 255,))


@pytest.mark.parametrize("count", [1, 9, 10, 11, 99, 101, 1000, 1009])
def test_few_images_are_all_measured(tmp_path: Path, count: int) -> None:
    index = packed(tmp_path / "pack", RAW, [bytes([level % 251]) for level in range(count)], (1, 1))
    assert statistics(index).about.mean == pytest.approx((np.mean(np.arange(count) % 251) / 255,))


def test_a_pack_of_nothing_has_no_channels() -> None:
    none = np.empty(0, np.int32)
    index = Index(About(RAW, (), (2, 2)), none, none, none, none, none)
    assert statistics(index) is index


def test_audio_files_have_no_channels(tmp_path: Path) -> None:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(100))
    index = packed(tmp_path / "pack", AUDIO, [out.getvalue()])
    assert statistics(index) is index


def test_notes_of_a_camera_that_cannot_be_read_do_no_harm(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 51, 0)).save(out, "JPEG", exif=b"Exif\0\0these are words", dpi=(72, 72))
    assert statistics(packed(tmp_path / "pack", IMAGE, [out.getvalue()])).about.mean[0] == pytest.approx(1, abs=0.02)


def test_a_damaged_pack_is_reported(tmp_path: Path) -> None:
    index = packed(tmp_path / "pack", RAW, [bytes([level]) for level in range(30)], (1, 1))
    (tmp_path / "pack" / "stripe-00001.arrow").unlink()
    with pytest.raises(PackError, match=r"stripe-00001\.arrow is missing"):
        statistics(index)
