"""Image files are packed with the options of the pack, and measured in the channels that they have."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from unisono.data.kinds.image import MIN_SIDE, ImageKind, RawKind
from unisono.data.pack.packing import PackOptions


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def test_short_side_and_quality_are_those_of_the_pack() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 60, 3), np.uint8))
    small, poor = (ImageKind().encode(png(noise), PackOptions(short_side=30, quality=each)) for each in (90, 10))
    assert Image.open(io.BytesIO(small)).size == (30, 45)
    assert len(poor) < len(small)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("I;16", 1), ("RGB", 3), ("P", 3)])
def test_pixels_have_one_channel_if_the_header_is_grey(mode: str, channels: int) -> None:
    sample = np.frombuffer(png(Image.new("L", (5, 4), 255).convert(mode)), np.uint8)
    found = ImageKind().pixels(sample, None)
    assert found is not None
    assert found.shape == (4, 5, channels)
    assert ImageKind().is_grey(sample) == (channels == 1)


def test_large_jpegs_are_measured_smaller() -> None:
    out = io.BytesIO()
    Image.new("RGB", (8 * MIN_SIDE, 9 * MIN_SIDE), (200, 100, 0)).save(out, "JPEG")
    found = ImageKind().pixels(np.frombuffer(out.getvalue(), np.uint8), None)
    assert found is not None
    assert found.shape == (9 * MIN_SIDE // 8, MIN_SIDE, 3)


def test_raw_samples_stay_as_they_are() -> None:
    assert RawKind().encode(b"\0\1\2", PackOptions(short_side=1)) == b"\0\1\2"


@pytest.mark.parametrize(("shape", "channels"), [((2, 6), 1), ((2, 6, 1), 1), ((2, 2, 3), 3)])
def test_pixels_have_the_shape_of_the_pack(shape: tuple[int, ...], channels: int) -> None:
    sample = np.arange(12, dtype=np.uint8)
    found = RawKind().pixels(sample, shape)
    assert found is not None
    assert found.shape == (*shape[:2], channels)
    assert found.ravel().tolist() == list(range(12))
