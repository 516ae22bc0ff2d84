"""Image files are packed with the options of the pack, measured in their channels, and cropped by decisions alone."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from unisono.data.kinds.image import (
    AUGMENTS,
    MAX_AREA,
    MAX_ASPECT,
    MAX_TRIES,
    MIN_AREA,
    MIN_ASPECT,
    MIN_SIDE,
    Box,
    ImageAugmentation,
    ImageKind,
    ImageOptions,
    Part,
    RawKind,
    choose_augmentation,
    middle,
    part_of,
    scale_and_aspect,
)
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
    pixels = ImageKind().pixels(sample, None)
    assert pixels is not None
    assert pixels.shape == (4, 5, channels)
    assert ImageKind().is_grey(sample) == (channels == 1)


def test_large_jpegs_are_measured_smaller() -> None:
    out = io.BytesIO()
    Image.new("RGB", (8 * MIN_SIDE, 9 * MIN_SIDE), (200, 100, 0)).save(out, "JPEG")
    pixels = ImageKind().pixels(np.frombuffer(out.getvalue(), np.uint8), None)
    assert pixels is not None
    assert pixels.shape == (9 * MIN_SIDE // 8, MIN_SIDE, 3)


def test_raw_samples_stay_as_they_are() -> None:
    assert RawKind().encode(b"\0\1\2", PackOptions(short_side=1)) == b"\0\1\2"


@pytest.mark.parametrize(("shape", "channels"), [((2, 6), 1), ((2, 6, 1), 1), ((2, 2, 3), 3)])
def test_pixels_have_the_shape_of_the_pack(shape: tuple[int, ...], channels: int) -> None:
    sample = np.arange(12, dtype=np.uint8)
    pixels = RawKind().pixels(sample, shape)
    assert pixels is not None
    assert pixels.shape == (*shape[:2], channels)
    assert pixels.ravel().tolist() == list(range(12))


VIEW = ImageOptions(32, 3, (0.5,) * 3, (0.25,) * 3)


def looks(augment: str, times: int = 2000) -> list[ImageAugmentation]:
    random = Random(1)
    options = replace(VIEW, augment=augment)
    return [choose_augmentation(options, 60, 40, random) for _ in range(times)]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_in_validation_every_augmentation_is_the_same(augment: str) -> None:
    share = 7 / 8 if augment in ("scale", "crop") else 1
    assert choose_augmentation(replace(VIEW, augment=augment), 60, 40, None) == ImageAugmentation(middle(60, 40, share))


def test_nothing_is_changed_at_random_unless_it_is_wanted() -> None:
    assert set(looks("none")) == {ImageAugmentation(Box(10, 0, 40, 40))}


@pytest.mark.parametrize("augment", ["mirror", "shift", "scale", "crop"])
def test_half_of_the_images_are_mirrored(augment: str) -> None:
    assert 900 < sum(each.mirrored for each in looks(augment)) < 1100


def test_mirroring_changes_nothing_else() -> None:
    assert {(each.box, each.right, each.down) for each in looks("mirror")} == {(Box(10, 0, 40, 40), 0, 0)}


def test_a_shift_is_up_to_an_eighth_in_any_direction_and_all_are_alike() -> None:
    drawn = looks("shift", 8100)
    assert {each.box for each in drawn} == {Box(10, 0, 40, 40)}
    counts = Counter((each.right, each.down) for each in drawn)
    assert set(counts) == {(right, down) for right in range(-4, 5) for down in range(-4, 5)}
    assert 50 < min(counts.values()) < max(counts.values()) < 150


def test_a_random_part_is_not_shifted() -> None:
    drawn = looks("scale")
    assert {(each.right, each.down) for each in drawn} == {(0, 0)}
    assert len({each.box for each in drawn}) > 500


def test_a_plain_crop_has_one_size_and_any_place() -> None:
    drawn = looks("crop", 8100)
    assert {(each.box.width, each.box.height, each.right, each.down) for each in drawn} == {(35, 35, 0, 0)}
    assert {each.box.x for each in drawn} == set(range(26))
    assert {each.box.y for each in drawn} == set(range(6))


def test_augmentation_follows_from_the_random_numbers_alone() -> None:
    assert looks("scale", 20) == looks("scale", 20)
    assert looks("scale", 1)[0].box == scale_and_aspect(60, 40, Random(1))


ALMOST = 1 - 2**-53
"""The largest number that is thrown."""


class GivenNumbers:
    """CounterRNG the same numbers again and again."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers, self.drawn = cycle(numbers), 0

    def random(self) -> float:
        self.drawn += 1
        return next(self._numbers)


numbers = st.floats(0, ALMOST)
rng = st.lists(numbers, min_size=1, max_size=45).map(GivenNumbers)
sides = st.integers(1, 3000)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Box, int, int]:
    """A box in an image."""
    width, height = draw(sides), draw(sides)
    wide, high = draw(st.integers(1, width)), draw(st.integers(1, height))
    return Box(draw(st.integers(0, width - wide)), draw(st.integers(0, height - high)), wide, high), width, height


def inside(box: Box, width: int, height: int) -> bool:
    return (
        box.width > 0
        and box.height > 0
        and 0 <= box.x <= box.x + box.width <= width
        and 0 <= box.y <= box.y + box.height <= height
    )


@given(sides, sides, rng)
def test_a_random_part_lies_in_the_image(width: int, height: int, rng: GivenNumbers) -> None:
    assert inside(scale_and_aspect(width, height, rng), width, height)


@given(sides, sides, rng)
def test_a_random_part_is_8_to_100_percent_of_the_area_and_3_to_4_or_4_to_3_in_shape_up_to_rounding(
    width: int, height: int, rng: GivenNumbers
) -> None:
    _, _, wide, high = scale_and_aspect(width, height, rng)
    assert MIN_ASPECT * (high - 0.5) <= wide + 0.5
    assert wide - 0.5 <= MAX_ASPECT * (high + 0.5)
    if rng.drawn > 2 * MAX_TRIES or (rng.drawn == 2 * MAX_TRIES and (wide == width or high == height)):
        return  # none has fitted
    assert MIN_AREA * width * height <= (wide + 0.5) * (high + 0.5)
    assert (wide - 0.5) * (high - 0.5) <= MAX_AREA * width * height


def test_a_part_can_be_anywhere() -> None:
    assert scale_and_aspect(100, 100, GivenNumbers([0.5, 0.5, 0, 0])) == (0, 0, 73, 73)
    assert scale_and_aspect(100, 100, GivenNumbers([0.5, 0.5, ALMOST, ALMOST])) == (27, 27, 73, 73)
    assert scale_and_aspect(100, 100, GivenNumbers([0.5, 0.5, ALMOST, 0])) == (27, 0, 73, 73)


def test_area_and_shape_follow_the_random_numbers() -> None:
    """0.08 of 300 x 300 is 7,200 pixels: 73.5 x 98, and 98 x 73.5."""
    assert scale_and_aspect(300, 300, GivenNumbers([0, 0, 0, 0])) == (0, 0, 73, 98)
    assert scale_and_aspect(300, 300, GivenNumbers([0, ALMOST, 0, 0])) == (0, 0, 98, 73)
    assert scale_and_aspect(300, 300, GivenNumbers([ALMOST, 0.5, 0, 0])) == (0, 0, 300, 300)


def test_what_does_not_fit_is_drawn_again() -> None:
    rng = GivenNumbers([ALMOST, 0, *[0.5, 0.5, 0, 0]])
    assert scale_and_aspect(100, 100, rng) == (0, 0, 73, 73)
    assert rng.drawn == 6


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (100, 100, (0, 0, 100, 100)),
        (1000, 90, (440, 0, 120, 90)),
        (90, 1000, (0, 440, 90, 120)),
        (1, 50, (0, 24, 1, 1)),
    ],
)
def test_where_nothing_fits_it_is_the_largest_part_in_the_middle(
    width: int, height: int, box: tuple[int, int, int, int]
) -> None:
    rng = GivenNumbers([ALMOST, 0])
    assert scale_and_aspect(width, height, rng) == box
    assert rng.drawn == 2 * MAX_TRIES


def test_validation_crops_224_of_256() -> None:
    assert middle(256, 256) == (16, 16, 224, 224)
    assert middle(500, 256) == (138, 16, 224, 224)
    assert middle(256, 500) == (16, 138, 224, 224)
    assert middle(33, 40, 1.0) == (0, 3, 33, 33)


@given(sides, sides, st.floats(0.01, 1))
def test_the_middle_is_a_square_as_far_from_either_edge(width: int, height: int, share: float) -> None:
    box = middle(width, height, share)
    assert inside(box, width, height)
    assert box.width == box.height
    assert abs(box.width - share * min(width, height)) <= 1
    for start, length, side in ((box.x, box.width, width), (box.y, box.height, height)):
        assert 0 <= (side - start - length) - start <= 1


def test_a_part_begins_at_a_block_and_is_as_small_as_may_be() -> None:
    """480 pixels of which 100 are wanted: at 1/4, where 16 pixels are 4."""
    box = Box(150, 60, 480, 400)
    assert part_of(box, 640, 480, 16, 100) == (Part(36, 15, 121, 100, 4), Box(1, 0, 120, 100))
    assert part_of(box, 640, 480, 16, 101) == (Part(72, 30, 243, 200, 2), Box(3, 0, 240, 200))
    assert part_of(box, 640, 480, 8, 201) == (Part(144, 60, 486, 400, 1), Box(6, 0, 480, 400))


@given(cases(), st.sampled_from([8, 16, 32]), st.integers(1, 400))
def test_a_part_lies_in_the_smaller_image_from_a_block_on_and_the_box_in_it(
    case: tuple[Box, int, int], block: int, size: int
) -> None:
    box, width, height = case
    part, within = part_of(box, width, height, block, size)
    assert inside(Box(*part[:4]), -(-width // part.shrink), -(-height // part.shrink))
    assert part.x % (block // part.shrink) == 0
    assert inside(within, part.width, part.height)


@given(cases(), st.sampled_from([8, 16, 32]), st.integers(1, 400))
def test_a_part_is_as_small_as_may_be_for_what_is_wanted(case: tuple[Box, int, int], block: int, size: int) -> None:
    box, width, height = case
    part, within = part_of(box, width, height, block, size)
    short = min(box.width, box.height)
    assert part.shrink == max(shrink for shrink in (1, 2, 4, 8) if shrink == 1 or short >= shrink * size)
    if short >= size:
        assert min(within.width, within.height) >= size
    assert within.x < block // part.shrink
    assert part.width == within.x + within.width
    assert (within.y, part.height) == (0, within.height)


@given(cases(), st.sampled_from([8, 16, 32]), st.integers(1, 400))
def test_the_box_in_the_part_is_the_box_in_the_image(case: tuple[Box, int, int], block: int, size: int) -> None:
    box, width, height = case
    part, within = part_of(box, width, height, block, size)
    for begin, length, start, full_length in (
        (part.x + within.x, within.width, box.x, box.width),
        (part.y + within.y, within.height, box.y, box.height),
    ):
        assert 0 <= start - begin * part.shrink < part.shrink
        assert abs(length * part.shrink - full_length) <= part.shrink / 2
