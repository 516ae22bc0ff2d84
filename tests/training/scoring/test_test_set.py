from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.conftest import work_on_ranks

from unisono.binding import CoreShare
from unisono.data.builtin import load_digits
from unisono.data.feed import packed_feed
from unisono.data.kinds import RAW, TEXT
from unisono.data.kinds.text import ByteTokenizer
from unisono.data.loading import PROCESSOR, Batch
from unisono.data.options import DataOptions
from unisono.data.pack.index import read_index
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import Source
from unisono.errors import PackError, UsageError
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.scoring.evaluate import compare_training_set, open_test_set, read_both

SHARE = CoreShare((0,), 1, False)


def packed(folder: Path, classes: tuple[str, ...], count: int, seed: int) -> None:
    samples = [np.random.default_rng([seed, index]).bytes(64) for index in range(count)]
    labels = np.arange(count) * len(classes) // count
    keys, sizes = [str(index) for index in range(count)], np.full(count, 64)
    source = Source(RAW, classes, keys, labels, sizes, samples.__getitem__, (8, 8))
    pack(source, folder, PackOptions(stripes=2), 1, lambda: None)


@pytest.fixture
def packs(tmp_path: Path) -> Path:
    packed(tmp_path / "own" / "train", ("cat", "dog"), 9, 0)
    packed(tmp_path / "own" / "test", ("cat", "dog"), 5, 1)
    packed(tmp_path / "other" / "val", ("cat", "dog"), 4, 2)
    packed(tmp_path / "strange" / "test", ("cat", "owl"), 4, 3)
    return tmp_path


def shares(recipe: Recipe, pack: Path | None, batch: int, ranks: int) -> list[list[Batch]]:
    """The batches of each rank."""

    def work(world: Any) -> list[Batch]:
        tests = open_test_set(recipe, pack, world, SHARE, PROCESSOR)
        batches = [(inputs.clone(), labels) for inputs, labels in tests.in_turn(batch)]
        tests.close()
        return batches

    return work_on_ranks(ranks, work)


def joined(batches: list[Batch]) -> tuple[torch.Tensor, list[int]]:
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([labels for _, labels in batches]).tolist()


def test_the_digits_are_as_in_training() -> None:
    recipe, data = parse_recipe(Recipe, {}, "a test"), load_digits().test
    (alone,) = shares(recipe, None, 100, 1)
    assert [len(labels) for _, labels in alone] == [100, 100, 100, 60]
    for ranks in (1, 3):
        inputs, labels = joined([batch for share in shares(recipe, None, 100, ranks) for batch in share])
        assert torch.equal(inputs, data.inputs)
        assert labels == data.labels.tolist()

    def facts(world: Any) -> tuple[Any, ...]:
        tests = open_test_set(recipe, None, world, SHARE, PROCESSOR)
        return tests.title, tests.names, tests.samples, tests.classes, tests.channels, tuple(tests.blank(2).shape)

    assert work_on_ranks(1, facts) == [("digits", tuple("0123456789"), 360, 10, 1, (2, 1, 8, 8))]


def test_the_digits_are_no_pack() -> None:
    with pytest.raises(UsageError, match="--pack elsewhere: the run was trained on digits, which is no pack"):
        shares(parse_recipe(Recipe, {}, "a test"), Path("elsewhere"), 8, 1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_samples_of_a_pack_are_those_that_the_run_was_tested_with(packs: Path, ranks: int) -> None:
    """Each rank has the batches of the feed, bit for bit: without random changes."""
    recipe = parse_recipe(Recipe, {"data": {"pack": str(packs / "own"), "augment": "mirror"}}, "a test")

    def tested(world: Any) -> list[Batch]:
        options = DataOptions(pack=str(packs / "own"), augment="mirror")
        feed = packed_feed(options, world, 0)
        batches = [(inputs.clone(), labels) for inputs, labels in feed.test_batches(2 * ranks)]
        feed.close()
        return batches

    expected, result = work_on_ranks(ranks, tested), shares(recipe, None, 2 * ranks, ranks)
    for share, expected_share in zip(result, expected, strict=True):
        assert [labels.tolist() for _, labels in share] == [labels.tolist() for _, labels in expected_share]
        assert all(torch.equal(here, there) for (here, _), (there, _) in zip(share, expected_share, strict=True))
    assert sorted(label for share in result for label in joined(share)[1]) == [0, 0, 0, 1, 1]


def test_another_pack_is_normalised_as_the_run_s(packs: Path) -> None:
    recipe = parse_recipe(Recipe, {"data": {"pack": str(packs / "own")}}, "a test")
    train, other = (each.about for each in read_both(packs / "own", packs / "other"))
    inputs, _ = joined(shares(recipe, packs / "other", 99, 1)[0])
    raw = np.frombuffer(np.random.default_rng([2, 0]).bytes(64), np.uint8) / 255
    np.testing.assert_allclose(inputs[0].flatten(), (raw - train.mean[0]) / train.std[0], rtol=1e-4, atol=1e-5)
    assert abs(train.mean[0] - other.mean[0]) > 1e-3, "else its own mean would do as well"


def test_a_folder_is_a_pack_with_a_test_set_or_the_set_itself(packs: Path) -> None:
    for pack_given, samples in ((None, 5), (packs / "other", 4), (packs / "own" / "train", 9)):
        assert len(read_both(packs / "own", pack_given)[1]) == samples
    with pytest.raises(PackError, match="nowhere has no pack named test or"):
        read_both(packs / "own", packs / "nowhere")


def test_differing_classes_are_named(packs: Path) -> None:
    with pytest.raises(PackError, match="it lacks dog; it adds owl; pack samples of the same classes"):
        read_both(packs / "own", packs / "strange")


def test_a_training_set_that_was_packed_again_is_told_and_one_of_other_classes_refused(packs: Path) -> None:
    trained = read_index(packs / "own" / "train").fingerprint
    assert compare_training_set(trained, packs / "own") == compare_training_set(trained[:10], packs / "own") == []
    packed(packs / "more" / "train", ("cat", "dog"), 10, 0)
    (line,) = compare_training_set(trained, packs / "more")
    assert line.startswith(f"the run was trained on other data ({trained}) than ")
    packed(packs / "renamed" / "train", ("cow", "dog"), 9, 0)
    with pytest.raises(PackError, match=r"renamed/train has other classes than .* or in another order; put its pack"):
        compare_training_set(trained, packs / "renamed")


def packed_texts(folder: Path, windows: int) -> None:
    samples = [np.arange(window, window + 5, dtype=np.uint16).tobytes() for window in range(windows)]
    labels, sizes = np.zeros(windows, int), np.full(windows, 10)
    keys = [str(window) for window in range(windows)]
    source = Source(TEXT, ByteTokenizer.tokens, keys, labels, sizes, samples.__getitem__, (5,))
    pack(source, folder, PackOptions(stripes=1), 1, lambda: None)


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_token_but_the_first_of_a_window_is_a_label_once(tmp_path: Path, ranks: int) -> None:
    packed_texts(tmp_path / "train", 2)
    packed_texts(tmp_path / "test", 4)
    recipe = parse_recipe(Recipe, {"data": {"pack": str(tmp_path)}}, "a test")
    batches = [batch for share in shares(recipe, None, 3, ranks) for batch in share]
    inputs, labels = joined(batches)
    assert inputs.dtype == torch.int64
    assert sorted(inputs.tolist()) == [list(range(first, first + 4)) for first in range(4)]
    assert sorted(labels) == [list(range(first, first + 4)) for first in range(1, 5)]

    def facts(world: Any) -> tuple[Any, ...]:
        tests = open_test_set(recipe, None, world, SHARE, PROCESSOR)
        known = tests.labels_are_tokens, tests.labels_per_sample, tests.bytes_per_label, tests.classes, tests.channels
        tests.close()
        return known

    assert work_on_ranks(1, facts) == [(True, 4, 1, 256, 4)]
