"""Data of a recipe, as a plan needs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.errors import RecipeError
from unisono.plan.loading import MAX_DECODING_THREADS, SampleFacts
from unisono.training.planned_data import PlannedData, data_of
from unisono.training.recipe import DataRecipe


def test_a_data_set_of_the_package_is_decoded_already() -> None:
    assert data_of(DataRecipe()) == PlannedData(SampleFacts(threads=MAX_DECODING_THREADS), 1437, 360, 10)
    with pytest.raises(RecipeError, match=r"data\.name = 'digit'; there are digits"):
        data_of(DataRecipe(name="digit"))


def test_a_pack_has_its_samples_bytes_and_pixels(image_samples: Callable[..., Path], tmp_path: Path) -> None:
    for name, count in (("train", 6), ("test", 2)):
        part = find(image_samples(tmp_path / "source" / name, count=count))[""]
        pack(part, tmp_path / "pack" / name, PackOptions(stripes=2), 1, lambda: None)
    files = sorted((tmp_path / "source" / "train").rglob("*.jpg"))
    found = data_of(DataRecipe(pack=str(tmp_path / "pack"), threads=3, groups=2))
    nbytes = sum(path.stat().st_size for path in files) / 12
    assert found == PlannedData(SampleFacts(nbytes, 40 * 32, 3, copies=2), 12, 4, 2)


def test_of_a_pack_that_is_elsewhere_only_its_form_is_known() -> None:
    found = data_of(DataRecipe(pack="packs/nowhere", storage="replicated"))
    assert found == PlannedData(SampleFacts(copies=0))
