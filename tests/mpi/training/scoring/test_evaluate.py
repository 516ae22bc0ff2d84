"""An evaluation is the same on any number of ranks, and finds the accuracy that the run reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unisono.data.kinds.text import TextOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.errors import CheckpointError, PackError
from unisono.training import run_directory
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.run import TrainOptions, train
from unisono.training.scoring import evaluation
from unisono.training.scoring.evaluate import evaluate
from unisono.world import World


def silent(_: str) -> None:
    """Nothing is printed."""


@pytest.mark.parametrize("rule", ["bsp", "local_sgd"])
def test_it_is_that_of_the_run_and_of_one_rank(group: World, packs: Path, tmp_path: Path, rule: str) -> None:
    home = group.call_on_root(lambda: tmp_path / "run")
    content = {
        "data": {"pack": str(packs), "augment": "mirror", "threads": 1},
        "model": {"name": "small_convnet", "dtype": "float64"},
        "optimizer": {"learning_rate": 0.1},
        "rule": {"name": rule, "overlap": "none", "every": 2},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 1, "batch": 32},
    }
    train(parse_recipe(Recipe, content, "a test"), group, TrainOptions(home))
    lines: list[str] = []
    together, facts = evaluate(home, group, None, False, lines.append)
    assert lines == [f"{home}: step 4, 37 samples of {packs / 'test'}, {group.size} rank{'s' * (group.size > 1)}"]
    (line,) = run_directory.read_metrics(home)
    assert together.accuracy.top1 == line["test_accuracy"]
    assert (together.samples, together.accuracy.top5, together.throughput) == (37, None, ())
    assert together.confusion is not None
    assert int(together.confusion.diagonal().sum()) / 37 == together.accuracy.top1
    assert (facts["step"], facts["ranks"]) == (4, group.size)
    alone = group.split(group.rank)
    serial, _ = evaluate(home, alone, None, False, silent)
    assert serial.confusion is not None
    assert np.array_equal(serial.confusion, together.confusion)
    assert serial.accuracy.loss == pytest.approx(together.accuracy.loss, rel=1e-12)
    assert (serial.accuracy.top1, serial.accuracy.top5) == (together.accuracy.top1, together.accuracy.top5)


def test_the_training_set_and_throughput(
    group: World, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training set is a pack with the same classes. Rank 0 measures; every rank has its result."""
    monkeypatch.setattr(evaluation, "TIMED_SECONDS", 0.0)
    home = group.call_on_root(lambda: tmp_path / "run")
    content = {
        "data": {"pack": str(packs), "threads": 1},
        "rule": {"overlap": "none"},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 1, "batch": 64},
    }
    train(parse_recipe(Recipe, content, "a test"), group, TrainOptions(home))
    result, facts = evaluate(home, group, packs / "train", True, silent)
    assert (result.samples, facts["data"]) == (101, str(packs / "train"))
    assert [entry.batch for entry in result.throughput] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert len(set(map(json.dumps, group.all_gather_object(result.throughput)))) == 1
    with pytest.raises(PackError, match="nowhere has no pack named test"):
        evaluate(home, group, Path("nowhere"), False, silent)
    group.call_on_root(lambda: (home / "checkpoints").rename(home / "gone"))
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        evaluate(home, group, None, False, silent)


def packed_text(folder: Path) -> Path:
    """A text of bytes: the test set has 7 windows of 8 tokens, which no number of ranks but 1 divides."""
    (folder / "counting.txt").write_text(" ".join(map(str, range(186))))
    for name, source in find(folder / "counting.txt", TextOptions(window=8)).items():
        pack(source, folder / "packs" / name, PackOptions(stripes=2), 1, lambda: None)
    return folder / "packs"


def test_a_text_is_that_of_the_run_and_of_one_rank(group: World, tmp_path: Path) -> None:
    """Ranks with unlike numbers of windows: each token has the same weight."""
    home = group.call_on_root(lambda: tmp_path)
    packs = group.call_on_root(lambda: packed_text(home))
    content = {
        "data": {"pack": str(packs), "threads": 1},
        "model": {"name": "gpt_small", "dtype": "float64"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        "rule": {"overlap": "none"},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 1, "batch": 10},
    }
    train(parse_recipe(Recipe, content, "a test"), group, TrainOptions(home / "run"))
    together, _ = evaluate(home / "run", group, None, False, silent)
    assert together.confusion is None
    assert together.samples % 2 == 1
    assert (together.tokens_per_sample, together.bytes_per_token) == (8, 1)
    (line,) = run_directory.read_metrics(home / "run")
    assert together.accuracy.loss == pytest.approx(line["test_loss"], rel=1e-12)
    assert together.accuracy.top1 == line["test_accuracy"]
    alone = group.split(group.rank)
    serial, _ = evaluate(home / "run", alone, None, False, silent)
    assert serial.accuracy.loss == pytest.approx(together.accuracy.loss, rel=1e-12)
    assert (serial.samples, serial.accuracy.top1) == (together.samples, together.accuracy.top1)
    alone.free()
