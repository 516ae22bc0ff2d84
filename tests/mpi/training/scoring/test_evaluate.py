"""An evaluation is the same on any number of ranks, and finds the accuracy that the run reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from unisono.errors import CheckpointError, PackError
from unisono.training import run_directory
from unisono.training.recipe import parse_recipe
from unisono.training.run import train
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
    train(parse_recipe(content, "a test"), group, home, None)
    lines: list[str] = []
    together, facts = evaluate(home, group, None, False, lines.append)
    assert lines == [f"{home}: step 4, 37 samples of {packs / 'test'}, {group.size} rank{'s' * (group.size > 1)}"]
    (line,) = run_directory.read_metrics(home)
    assert together.accuracy.top1 == line["test_accuracy"]
    assert (together.samples, together.accuracy.top5, together.throughput) == (37, None, ())
    assert int(together.confusion.diagonal().sum()) / 37 == together.accuracy.top1
    assert (facts["step"], facts["ranks"]) == (4, group.size)
    alone = group.split(group.rank)
    serial, _ = evaluate(home, alone, None, False, silent)
    assert np.array_equal(serial.confusion, together.confusion)
    assert serial.accuracy.loss == pytest.approx(together.accuracy.loss, rel=1e-12)
    assert (serial.accuracy.top1, serial.accuracy.top5) == (together.accuracy.top1, together.accuracy.top5)


def test_the_training_set_and_throughput(group: World, packs: Path, tmp_path: Path) -> None:
    """The training set is a pack with the same classes. Rank 0 measures; every rank has its result."""
    home = group.call_on_root(lambda: tmp_path / "run")
    content = {
        "data": {"pack": str(packs), "threads": 1},
        "rule": {"overlap": "none"},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 1, "batch": 64},
    }
    train(parse_recipe(content, "a test"), group, home, None)
    found, facts = evaluate(home, group, packs / "train", True, silent)
    assert (found.samples, facts["data"]) == (101, str(packs / "train"))
    assert [entry.batch for entry in found.throughput] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert len(set(map(json.dumps, group.all_gather_object(found.throughput)))) == 1
    with pytest.raises(PackError, match="nowhere has no pack named test"):
        evaluate(home, group, Path("nowhere"), False, silent)
    group.call_on_root(lambda: (home / "checkpoints").rename(home / "gone"))
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        evaluate(home, group, None, False, silent)
