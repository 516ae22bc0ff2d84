"""A run on a pack follows the same path on any number of ranks, however they hold it and wherever it is resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.data.feed import Feed
from unisono.errors import RecipeError
from unisono.placement import one_rank_per_node
from unisono.schedules.pieces import bounds
from unisono.training import memory_copies, run
from unisono.training.checkpoint.files import load_newest
from unisono.training.checkpoint.layout import step_of
from unisono.training.player import EventPlayer, TogetherPlayer
from unisono.training.recipe import Recipe, RuleRecipe, parse_recipe
from unisono.training.recipe_check import make_rule
from unisono.training.run import TrainOptions, train
from unisono.training.worker import WorkerPlayer
from unisono.world import World


def recipe_of(packs: Path, hold: str = "even", groups: int = 1) -> Recipe:
    """Two epochs of 4 steps, with a checkpoint after every third."""
    content = {
        "data": {"pack": str(packs), "hold": hold, "groups": groups, "augment": "mirror", "threads": 1},
        "model": {"name": "small_convnet", "dtype": "float64"},
        "optimizer": {"learning_rate": 0.2, "policy": "cosine", "warm_epochs": 0.5, "weight_decay": 1e-3},
        "rule": {"overlap": "none"},
        "exchange": {"bucket_megabytes": 1},
        "training": {"epochs": 2, "batch": 32, "checkpoint_every": 3},
    }
    return parse_recipe(Recipe, content, "a test")


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The metrics of the epochs, and the weights at the end."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    checkpoint, incomplete = load_newest(run / "checkpoints")
    assert (checkpoint.step, incomplete) == (8, [])
    return lines, checkpoint.weights


def assert_alike(run: Path, serial: Path) -> None:
    lines, weights = outcome(run)
    expected, others = outcome(serial)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-9)
    assert [line["test_accuracy"] for line in lines] == [line["test_accuracy"] for line in expected]
    assert [line["learning_rate"] for line in lines] == [line["learning_rate"] for line in expected]
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-9, atol=1e-10)


def stopped(run: Path, copy: Path) -> None:
    """A copy of a run as if it had stopped two steps into the second epoch."""
    shutil.copytree(run, copy)
    shutil.rmtree(max((copy / "checkpoints").iterdir()))
    assert max((copy / "checkpoints").iterdir()).name == "step-000000006"


def test_the_same_path_on_any_number_of_ranks(group: World, packs: Path, tmp_path: Path) -> None:
    home = group.call_on_root(lambda: tmp_path)
    alone = group.split(group.rank)
    group.call_on_root(lambda: train(recipe_of(packs), alone, TrainOptions(home / "serial")))
    lines, _ = outcome(home / "serial")
    assert lines[-1]["loss"] < lines[0]["loss"], "a run that learns nothing is like any other"
    train(recipe_of(packs), group, TrainOptions(home / "even"))
    train(recipe_of(packs, "whole"), group, TrainOptions(home / "whole"))
    group.call_on_root(lambda: stopped(home / "serial", home / "resumed"))
    train(recipe_of(packs, groups=group.size), group, TrainOptions(resume=home / "resumed"))
    for name in ("even", "whole", "resumed"):
        group.call_on_root(lambda name=name: assert_alike(home / name, home / "serial"))

    def exchange_parts() -> Path:
        (home / "other").mkdir()
        (home / "other/train").symlink_to(packs / "test")
        (home / "other/test").symlink_to(packs / "train")
        stopped(home / "serial", home / "stopped")
        return home / "other"

    other = group.call_on_root(exchange_parts)
    with pytest.raises(RecipeError, match="the run stopped 2 steps into an epoch of other data"):
        train(recipe_of(other), group, TrainOptions(resume=home / "stopped"))
    alone.free()


def test_sharded_runs_are_those_of_one_rank_and_resume_on_any_number(group: World, packs: Path, tmp_path: Path) -> None:
    """A checkpoint of shards goes on unsharded on one rank, and one of one rank goes on in shards.

    LAMB has the moments of Adam, and norms of whole layers.
    """
    home = group.call_on_root(lambda: tmp_path)
    recipe = recipe_of(packs)
    options = replace(recipe.optimizer, name="lamb", learning_rate=0.01, clip=0.5)
    plain = replace(recipe, optimizer=options)
    sharded = replace(plain, rule=replace(plain.rule, name="sharded"))
    alone = group.split(group.rank)
    group.call_on_root(lambda: train(plain, alone, TrainOptions(home / "serial")))
    train(sharded, group, TrainOptions(home / "sharded"))

    def stop() -> None:
        stopped(home / "serial", home / "resumed")
        stopped(home / "sharded", home / "alone")
        train(plain, alone, TrainOptions(resume=home / "alone"))

    group.call_on_root(stop)
    train(sharded, group, TrainOptions(resume=home / "resumed"))
    for name in ("sharded", "resumed", "alone"):
        group.call_on_root(lambda name=name: assert_alike(home / name, home / "serial"))
    alone.free()


@pytest.mark.parametrize(("name", "options"), [("sharded", {}), ("local_sgd", {"every": 2})])
def test_a_run_whose_first_host_is_lost_goes_on_from_the_copy_of_the_second(
    group: World, packs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, int]
) -> None:
    monkeypatch.setattr(memory_copies, "MAX_SHARE", 1e9)  # one after each step, if the last is written
    on = World(group.comm.Dup(), one_rank_per_node(group.size), group.table)
    home = group.call_on_root(lambda: tmp_path)
    run, memory = home / "run", home / f"memory-{group.rank}"
    recipe = recipe_of(packs)
    recipe = replace(recipe, rule=replace(recipe.rule, name=name, options=options))
    train(recipe, on, TrainOptions(run, memory=memory))
    _, weights = outcome(run)
    group.barrier()  # all have read it

    def lose() -> str:
        if group.size > 1:
            shutil.rmtree(memory)
        copy = max((home / f"memory-{min(1, group.size - 1)}").glob("step-*")).name
        for newer in [path for path in (run / "checkpoints").iterdir() if path.name >= copy]:
            shutil.rmtree(newer)
        return copy

    copy = group.call_on_root(lose)
    train(recipe, on, TrainOptions(resume=run, memory=memory))
    assert f"resumes after step {step_of(copy)}\n" in (run / "log.txt").read_text()
    for key, weight in outcome(run)[1].items():
        assert torch.equal(weight, weights[key])
    on.free()


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_a_run_whose_ranks_differ_resumes_bit_for_bit_on_as_many_and_from_common_weights_on_others(
    group: World, packs: Path, tmp_path: Path, name: str
) -> None:
    """The checkpoint, two steps before the end, lies between two averages; with DiLoCo, a fragment is in flight."""
    home = group.call_on_root(lambda: tmp_path)
    recipe = recipe_of(packs)
    options: dict[str, float] = {} if name == "local_sgd" else {"fragments": 1, "delay": 2, "outer_momentum": 0.5}
    recipe = replace(recipe, rule=replace(recipe.rule, name=name, options={"every": 4, **options}))
    if name == "diloco":
        recipe = replace(recipe, exchange=replace(recipe.exchange, wire="int4"))
    train(recipe, group, TrainOptions(home / "whole"))

    def stop() -> None:
        stopped(home / "whole", home / "resumed")
        stopped(home / "whole", home / "alone")

    group.call_on_root(stop)
    train(recipe, group, TrainOptions(resume=home / "resumed"))
    alone = group.split(group.rank)

    def check() -> None:
        uninterrupted, resumed = (load_newest(home / name / "checkpoints")[0] for name in ("whole", "resumed"))
        for mine, its in zip(uninterrupted.optimizer["ranks"], resumed.optimizer["ranks"], strict=True):
            assert all(torch.equal(mine["weights"][name], its["weights"][name]) for name in its["weights"])
        assert all(torch.equal(uninterrupted.weights[name], value) for name, value in resumed.weights.items())
        train(recipe, alone, TrainOptions(resume=home / "alone"))

    group.call_on_root(check)
    alone.free()


@pytest.mark.parametrize(("rule", "player"), [("bsp", TogetherPlayer), ("easgd", WorkerPlayer)])
def test_an_interrupted_run_says_how_it_is_resumed(
    group: World,
    packs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rule: str,
    player: type[EventPlayer],
) -> None:
    home, recipe = group.call_on_root(lambda: tmp_path) / "run", recipe_of(packs)

    def interrupted(_: EventPlayer) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(player, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(replace(recipe, rule=RuleRecipe(rule, options={"server": "thread"})), group, TrainOptions(home))
    assert (f"resume with: unisono train --resume {home}\n" in capsys.readouterr().out) == (group.rank == 0)


def test_the_warm_up_of_a_worker_has_as_many_samples_as_its_steps(
    group: World, packs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if group.size == 1:
        return
    recipe, sizes = recipe_of(packs), list[int]()
    recipe = replace(recipe, rule=RuleRecipe("easgd", options={"server": "rank"}))
    monkeypatch.setattr(run, "warm_up", lambda _, inputs, *__: sizes.append(len(inputs)))
    feed, trainer, _, _ = run.make_parts(recipe, group, make_rule(recipe), None, None)
    first, last = bounds(recipe.training.batch, group.size - 1, min(group.rank, group.size - 2))
    assert sizes == [last - first]
    trainer.reducer.release()
    if isinstance(feed, Feed):
        feed.close()


@pytest.mark.parametrize(("rule", "hold"), [("bsp", "even"), ("sharded", "whole")])
def test_virtual_ranks_have_the_same_bits_on_any_number_of_ranks(
    world: World, packs: Path, tmp_path: Path, rule: str, hold: str
) -> None:
    """Five shares of batches of 30, of which the last is short: on 1 to all ranks, and resumed on all."""
    home = world.call_on_root(lambda: tmp_path)
    recipe = recipe_of(packs, hold)
    recipe = replace(
        recipe,
        model=replace(recipe.model, dtype="float32"),
        training=replace(recipe.training, batch=30, virtual_ranks=5),
        compute=replace(recipe.compute, convolutions="library"),
    )
    weights = []
    for ranks in range(1, world.size + 1):
        group = world.split(world.rank // ranks)
        if world.rank < ranks:
            own = replace(recipe, rule=replace(recipe.rule, name=rule if ranks > 1 else "bsp"))
            train(own, group, TrainOptions(home / f"{ranks}"))
            weights.append(outcome(home / f"{ranks}")[1])
        group.free()
    world.call_on_root(lambda: stopped(home / "1", home / "resumed"))
    train(recipe, world, TrainOptions(resume=home / "resumed"))
    weights.append(outcome(home / "resumed")[1])
    for other in weights[1:]:
        assert all(tensor.equal(weights[0][name]) for name, tensor in other.items())
    digits = world.all_gather_object(next(iter(weights[0].values())).sum().item())
    assert len(set(digits)) == 1
