from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from unisono.data.images.augmentation import AUGMENTS, ImageAugmentation, ImageOptions, choose_augmentation
from unisono.data.images.crops import Box, middle, scale_and_aspect

VIEW = ImageOptions(32, 3, (0.5,) * 3, (0.25,) * 3)


def looks(augment: str, times: int = 2000) -> list[ImageAugmentation]:
    random = Random(1)
    options = replace(VIEW, augment=augment)
    return [choose_augmentation(options, 60, 40, random) for _ in range(times)]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_in_validation_every_augmentation_is_the_same(augment: str) -> None:
    share = 7 / 8 if augment == "scale" else 1
    assert choose_augmentation(replace(VIEW, augment=augment), 60, 40, None) == ImageAugmentation(middle(60, 40, share))


def test_nothing_is_changed_at_random_unless_it_is_wanted() -> None:
    assert set(looks("none")) == {ImageAugmentation(Box(10, 0, 40, 40))}


@pytest.mark.parametrize("augment", ["mirror", "shift", "scale"])
def test_half_of_the_images_are_mirrored(augment: str) -> None:
    assert 900 < sum(each.mirrored for each in looks(augment)) < 1100


def test_mirroring_changes_nothing_else() -> None:
    assert {(each.box, each.right, each.down) for each in looks("mirror")} == {(Box(10, 0, 40, 40), 0, 0)}


def test_a_shift_is_up_to_an_eighth_in_any_direction_and_all_are_alike() -> None:
    found = looks("shift", 8100)
    assert {each.box for each in found} == {Box(10, 0, 40, 40)}
    counts = Counter((each.right, each.down) for each in found)
    assert set(counts) == {(right, down) for right in range(-4, 5) for down in range(-4, 5)}
    assert 50 < min(counts.values()) < max(counts.values()) < 150


def test_a_random_part_is_not_shifted() -> None:
    found = looks("scale")
    assert {(each.right, each.down) for each in found} == {(0, 0)}
    assert len({each.box for each in found}) > 500


def test_augmentation_follows_from_the_random_numbers_alone() -> None:
    assert looks("scale", 20) == looks("scale", 20)
    assert looks("scale", 1)[0].box == scale_and_aspect(60, 40, Random(1))
