"""Runs of a recipe whose layers are split follow the path of whole ones, through checkpoints with another split."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.mpi.training.test_run import assert_alike, recipe_of, stopped

from unisono.step.costs import Cost
from unisono.tensor_parallel import choose_plan
from unisono.training.checkpoint.files import load_newest
from unisono.training.recipe import ParallelRecipe, Recipe
from unisono.training.run import TrainOptions, train
from unisono.world import World

PAIR = {"classifier.1": "column gives part", "classifier.3": "row takes part", "features.5": "column"}
OTHER = {"features.*": "column", "classifier.1": "row"}


def split(recipe: Recipe, ranks: int, layers: dict[str, str] = PAIR) -> Recipe:
    return replace(
        recipe,
        parallel=ParallelRecipe(ranks, {name: how for name, how in layers.items() if name != "features.*"}),
        optimizer=replace(recipe.optimizer, clip=0.5),
    )


@pytest.mark.parametrize("changes", [{}, {"name": "lamb", "learning_rate": 0.01}], ids=["sgd", "lamb"])
def test_split_runs_follow_the_path_of_whole_ones_and_resume_with_other_splits(
    group: World, packs: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    def recipe(hold: str = "even") -> Recipe:
        made = recipe_of(packs, hold)
        return replace(made, optimizer=replace(made.optimizer, **changes))

    home = group.call_on_root(lambda: tmp_path)
    unsplit = split(recipe(), 1, {})
    sizes = [size for size in (1, 2, 4) if group.size % size == 0]
    alone = group.split(group.rank)
    group.call_on_root(lambda: train(unsplit, alone, TrainOptions(home / "serial")))
    for size in sizes:
        hold = "whole" if size == 2 else "even"
        train(split(recipe(hold), size), group, TrainOptions(home / f"split-{size}"))
    for size in sizes:
        group.call_on_root(lambda size=size: assert_alike(home / f"split-{size}", home / "serial"))

    def stop() -> None:
        stopped(home / "serial", home / "a")
        stopped(home / f"split-{sizes[-1]}", home / "b")
        stopped(home / f"split-{sizes[-1]}", home / "c")

    group.call_on_root(stop)
    train(split(recipe(), sizes[-1]), group, TrainOptions(resume=home / "a"))
    train(split(recipe(), sizes[0], OTHER), group, TrainOptions(resume=home / "b"))
    group.call_on_root(lambda: train(unsplit, alone, TrainOptions(resume=home / "c")))
    for name in "abc":
        group.call_on_root(lambda name=name: assert_alike(home / name, home / "serial"))
    alone.free()


def test_dropouts_follow_from_seed_step_sample_and_layer(group: World, packs: Path, tmp_path: Path) -> None:
    """Under any plan, also one that splits nothing, on any number of ranks."""
    home = group.call_on_root(lambda: tmp_path)
    recipe = recipe_of(packs)
    network = replace(recipe.model, name="tests.mpi.tensor_parallel.networks:dropped")
    recipe = replace(recipe, model=network, optimizer=replace(recipe.optimizer, learning_rate=0.05))
    layers = {"0": "column", "3": "column gives part", "6": "row takes part"}
    alone = group.split(group.rank)
    group.call_on_root(lambda: train(split(recipe, 1, layers), alone, TrainOptions(home / "serial")))
    for size in (1, 2, 4):
        if group.size % size == 0:
            train(split(recipe, size, layers), group, TrainOptions(home / f"split-{size}"))
            group.call_on_root(lambda size=size: assert_alike(home / f"split-{size}", home / "serial"))
    alone.free()


def test_a_run_says_where_samples_are_gathered_and_scattered(
    group: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = group.call_on_root(lambda: tmp_path)
    train(split(recipe_of(packs), group.size), group, TrainOptions(home / "split"))
    said = group.call_on_root(lambda: capsys.readouterr().out)
    pair = f"samples of {group.size} ranks: gathered before classifier.1, scattered after classifier.3"
    assert (pair in said) == (group.size > 1)


def test_checkpoints_are_the_same_whatever_the_split(group: World, packs: Path, tmp_path: Path) -> None:
    home = group.call_on_root(lambda: tmp_path)
    train(split(recipe_of(packs), 1, {}), group, TrainOptions(home / "whole"))
    train(split(recipe_of(packs), 0), group, TrainOptions(home / "split"))

    def compare() -> None:
        unsplit, other = (load_newest(home / name / "checkpoints")[0] for name in ("whole", "split"))
        assert list(unsplit.weights) == list(other.weights)
        for name, value in unsplit.weights.items():
            assert (value.shape, value.dtype) == (other.weights[name].shape, other.weights[name].dtype)
        assert unsplit.optimizer["param_groups"] == other.optimizer["param_groups"]
        for index, state in unsplit.optimizer["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(other.optimizer["state"][index][key], value, rtol=1e-8, atol=1e-10)

    group.call_on_root(compare)


@pytest.mark.parametrize("cost", [Cost(0.0, 1.0), Cost(0.0, 0.0)], ids=["slow link", "fast link"])
def test_a_run_with_layers_by_prediction_follows_the_path_of_whole_ones(
    group: World,
    packs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cost: Cost,
) -> None:
    monkeypatch.setattr(choose_plan, "fit", lambda *_: cost)
    monkeypatch.setattr(choose_plan, "seconds_of_call", lambda *_: 0.0)
    monkeypatch.setattr(choose_plan, "measure_beside", lambda *_: 1.0)
    home = group.call_on_root(lambda: tmp_path)
    recipe = split(recipe_of(packs), 0, {})
    alone = group.split(group.rank)
    group.call_on_root(lambda: train(recipe, alone, TrainOptions(home / "serial")))
    capsys.readouterr()
    train(replace(recipe, parallel=ParallelRecipe(layers="auto")), group, TrainOptions(home / "auto"))
    said = group.call_on_root(lambda: capsys.readouterr().out)
    slow = cost.per_byte > 0 and group.size > 1
    assert ("layers split by prediction: none" in said) == (not slow)
    assert bool(re.search(r"split by prediction: .*classifier\.\d: (column|row) \d", said)) == slow
    group.call_on_root(lambda: assert_alike(home / "auto", home / "serial"))
    assert group.call_on_root(lambda: 'layers = "auto"' in (home / "auto" / "recipe.toml").read_text())
    alone.free()


def test_a_rule_that_needs_whole_weights_splits_nothing(
    group: World, packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = group.call_on_root(lambda: tmp_path)
    recipe = replace(recipe_of(packs), parallel=ParallelRecipe(layers="auto"))
    recipe = replace(recipe, training=replace(recipe.training, epochs=1))
    local = replace(recipe, rule=replace(recipe.rule, name="local_sgd", options={"every": 2}))
    train(local, group, TrainOptions(home / "local"))
    said = group.call_on_root(lambda: capsys.readouterr().out)
    assert "layers split by prediction: none, LocalSGD does not take split layers" in said
