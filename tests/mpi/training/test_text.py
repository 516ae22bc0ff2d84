"""A language model on packed text: the same path on any number of ranks, with uneven shares of tokens."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.data.kinds.text import TextOptions
from unisono.data.pack.packing import PackOptions, pack
from unisono.data.sources import find
from unisono.training.checkpoint.files import load_newest
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.run import TrainOptions, train
from unisono.world import World

BATCH = 5
"""Windows of a step: two ranks have 2 and 3 of them, and the last step has 4."""


def packed(folder: Path) -> Path:
    (folder / "counting.txt").write_text(" ".join(map(str, range(110))) + ".")
    for name, source in find(folder / "counting.txt", TextOptions(window=8)).items():
        pack(source, folder / "packs" / name, PackOptions(stripes=2), 1, lambda: None)
    return folder / "packs"


def recipe_of(packs: Path) -> Recipe:
    content = {
        "data": {"pack": str(packs), "threads": 1},
        "model": {"name": "gpt_small", "dtype": "float64"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip": 1.0},
        "rule": {"overlap": "none"},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 2, "batch": BATCH},
    }
    return parse_recipe(Recipe, content, "a test")


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return lines, load_newest(run / "checkpoints")[0].weights


def test_a_language_model_follows_the_same_path_on_any_number_of_ranks(group: World, tmp_path: Path) -> None:
    home = group.call_on_root(lambda: tmp_path)
    packs = group.call_on_root(lambda: packed(home))
    alone = group.split(group.rank)
    group.call_on_root(lambda: train(recipe_of(packs), alone, TrainOptions(home / "serial")))
    train(recipe_of(packs), group, TrainOptions(home / "parallel"))

    def check() -> None:
        lines, weights = outcome(home / "parallel")
        expected, others = outcome(home / "serial")
        assert lines[-1]["loss"] < lines[0]["loss"], "a run that learns nothing is like any other"
        for line, other in zip(lines, expected, strict=True):
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-9)
            assert line["test_loss"] == pytest.approx(other["test_loss"], rel=1e-9)
            assert line["test_perplexity"] == pytest.approx(exp(line["test_loss"]))
            assert line["tokens_per_second"] == pytest.approx(8 * line["samples_per_second"])
        for name, weight in weights.items():
            torch.testing.assert_close(weight, others[name], rtol=1e-7, atol=1e-9)

    group.call_on_root(check)
    alone.free()
