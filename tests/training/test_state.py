"""State of a run: what a resumed run loads and keeps, and what may have changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.asynchronous.messages import Reply, WorkerProgress
from unisono.errors import CheckpointError, RecipeError, UsageError
from unisono.reducer.made_on import made_on
from unisono.rules import BSP, DiLoCo, Exchange, LocalSGD
from unisono.training import state
from unisono.training.checkpoint.files import load_newest, save
from unisono.training.checkpoint.layout import Checkpoint, checkpoint_names
from unisono.training.cut import centre_checkpoint
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.run_directory import METRICS, add_metrics
from unisono.training.state import (
    RunPoint,
    check_change,
    check_ranks,
    describe_change,
    discard_newer,
    load_rank,
    load_states,
    resume_run,
    states_of,
)


def recipe(**tables: dict[str, object]) -> Recipe:
    return parse_recipe(Recipe, tables, "a test")


BEFORE = recipe(training={"batch": 64, "seed": 1})
WITHIN, BETWEEN = RunPoint(epoch=3, done=5, step=20, data="these"), RunPoint(epoch=3, step=20, data="these")

CHANGES = [
    (recipe(training={"batch": 32, "seed": 1}), "these", r"training\.batch = 32, but the run stopped 5 steps into"),
    (recipe(training={"batch": 64, "seed": 2}), "these", r"training\.seed = 2, but the run stopped 5 steps into"),
    (
        recipe(training={"batch": 64, "seed": 1}, data={"shuffle": "every:2"}),
        "these",
        r"data\.shuffle = every:2, but the run stopped 5 steps into an epoch with epoch",
    ),
    (BEFORE, "others", r"5 steps into an epoch of other data \(these\) than now \(others\)"),
]


@pytest.mark.parametrize(("now", "data", "message"), CHANGES)
def test_within_an_epoch_its_order_stays(now: Recipe, data: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_change(BEFORE, now, WITHIN, data)


@pytest.mark.parametrize(("now", "data", "message"), CHANGES)
def test_between_epochs_it_may_change(now: Recipe, data: str, message: str) -> None:
    check_change(BEFORE, now, BETWEEN, data)


def test_another_order_of_the_same_data_is_named() -> None:
    point = replace(WITHIN, data="40 13c62b16, 12 2f471622, partitioned")
    with pytest.raises(RecipeError, match=r"of these data in another order \(.*partitioned\) than now .*data\.storage"):
        check_change(BEFORE, BEFORE, point, "40 13c62b16, 12 2f471622, streamed")


def test_other_classes_are_refused_at_any_step() -> None:
    point = replace(BETWEEN, data="40 13c62b16 00c0ffee 0decade5, 12 2f471622 0badcafe 0decade5")
    check_change(BEFORE, BEFORE, point, "44 13c62b17 00c0ffef 0decade5, 12 2f471622 0badcafe 0decade5")
    check_change(BEFORE, BEFORE, point, "44 13c62b17 00c0ffef, 12 2f471622 0badcafe")
    check_change(BEFORE, BEFORE, point, "44 13c62b17 00c0ffef partitioned")  # before today
    with pytest.raises(RecipeError, match=r"was trained on other classes than .* or in another order; pack them with"):
        check_change(BEFORE, BEFORE, point, "40 13c62b16 00c0fff0 0dec0de5, 12 2f471622 0badcaff 0dec0de5")


def test_other_data_between_epochs_are_told() -> None:
    before = replace(BETWEEN, data="40 13c62b16, 12 2f471622, streamed")
    assert describe_change(before, "40 13c62b16 00c0ffee, 12 2f471622 0badcafe") == []
    assert describe_change(RunPoint(), "40 13c62b16, 12 2f471622") == []
    (line,) = describe_change(before, "44 13c62b17, 12 2f471622")
    assert line == (
        "the run was trained on other data (40 13c62b16, 12 2f471622) than it goes on with (44 13c62b17, 12 2f471622)"
    )


def test_the_rate_may_always_change_and_the_optimizer_never() -> None:
    changed = {"learning_rate": 0.5, "policy": "cosine", "weight_decay": 0.1}
    for point in (WITHIN, BETWEEN):
        check_change(BEFORE, recipe(training={"batch": 64, "seed": 1}, optimizer=changed), point, "these")
        with pytest.raises(RecipeError, match=r"optimizer\.name = 'lamb', but the run has the state of 'sgd'"):
            check_change(BEFORE, recipe(optimizer={"name": "lamb"}), point, "these")


def test_bits_are_promised_where_they_depend_on_the_same() -> None:
    elsewhere = replace(BETWEEN, made_on="Xeon (AVX2), PyTorch 1.0, unisono 0.1")
    with pytest.raises(RecipeError, match=r"computed with Xeon .* would go on with .*; resume there, or --set"):
        check_change(BEFORE, recipe(training={"batch": 64, "virtual_ranks": 4}), elsewhere, "these")
    for now, point in (
        (BEFORE, elsewhere),
        (recipe(training={"virtual_ranks": 4}), replace(BETWEEN, made_on=made_on())),
    ):
        check_change(BEFORE, now, point, "these")


@pytest.mark.parametrize("virtual", [0, 4])
def test_ranks_with_other_modules_of_a_user_are_named(tmp_path: Path, virtual: int) -> None:
    (tmp_path / "wide_nets.py").write_text("")
    own = recipe(model={"name": "wide_nets:wide", "folder": str(tmp_path)}, training={"virtual_ranks": virtual})
    world: Any = SimpleNamespace(size=1, all_gather_object=lambda code: [code, code, "wide_nets.py (0)"])
    if not virtual:
        check_ranks(world, own)
        return
    with pytest.raises(UsageError, match=r"training\.virtual_ranks = 4 .* 0 computes with wide_nets\.py .* and rank 2"):
        check_ranks(world, own)


class Alone:
    """A world of one rank."""

    rank = 0

    def call_on_root(self, function: Callable[[], Any]) -> Any:
        return function()


def trainer(width: int = 3) -> Any:
    model = torch.nn.Linear(width, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    programs = SimpleNamespace(resume=lambda step, rule: None)
    reducer = SimpleNamespace(restore=lambda state: None, programs=programs, traits=BSP().traits)
    return SimpleNamespace(model=model, optimizer=optimizer, reducer=reducer, world=SimpleNamespace(rank=0))


WORLD: Any = Alone()


def keep(run: Path, step: int, key: str = "reducer") -> Path:
    add_metrics(run, {"step": step})
    progress = {"epoch": step, "done": 0, "loss": 0.0, "seconds": 1.0, "data": "these", key: None}
    of = trainer()
    return save(run / "checkpoints", Checkpoint(step, of.model.state_dict(), of.optimizer.state_dict(), progress))


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / METRICS).read_text().splitlines()]


def test_incomplete_checkpoints_are_renamed_after_the_rest_was_checked(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    (keep(tmp_path, 2) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step 1's checkpoint does not fit the recipe's model: .*nothing was"):
        resume_run(tmp_path, trainer(5), WORLD)
    assert (steps(tmp_path), len(checkpoint_names(tmp_path / "checkpoints"))) == ([1, 2], 2)
    point, incomplete, _ = resume_run(tmp_path, trainer(), WORLD)
    assert (steps(tmp_path), len(checkpoint_names(tmp_path / "checkpoints"))) == ([1, 2], 2), (
        "check_change may refuse it yet"
    )
    said = discard_newer(tmp_path, point.step, incomplete)
    assert said == [
        "step-000000002 is damaged: it has no manifest.json; it is now step-000000002.torn, and the previous one is "
        "used",
    ]
    assert (steps(tmp_path), checkpoint_names(tmp_path / "checkpoints")) == ([1], ["step-000000001"])


@pytest.mark.parametrize(("torn", "begin"), [((), 4), ((4,), 3), ((1, 2, 4), 3), ((1, 4), 3)])
def test_a_copy_in_memory_goes_before_older_checkpoints_where_newer_ones_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: tuple[int, ...], begin: int
) -> None:
    for step in (1, 2, 4):
        if step in torn:
            (keep(tmp_path, step) / "manifest.json").unlink()
        else:
            keep(tmp_path, step)
    (memory := tmp_path / "memory").mkdir()
    copy = load_newest(keep(memory, 3).parent)[0]
    monkeypatch.setattr(state, "newest_copy", lambda *_: copy)
    point, damaged, _ = resume_run(tmp_path, trainer(), WORLD, memory)
    assert (point.step, len(damaged)) == (begin, int(4 in torn))


@pytest.mark.parametrize("key", ["reducer", "meeting"])
def test_checkpoints_of_older_releases_open(tmp_path: Path, key: str) -> None:
    keep(tmp_path, 1, key)
    point, incomplete, notes = resume_run(tmp_path, trainer(), WORLD)
    assert (point.step, point.data, incomplete, notes) == (1, "these", [], [])


def test_the_states_of_ranks_of_older_releases_open() -> None:
    """They had none of the rule."""
    of, before = trainer(), trainer()
    of.reducer.traits = LocalSGD().traits
    rank = {"weights": before.model.state_dict(), "optimizer": before.optimizer.state_dict()}
    world: Any = SimpleNamespace(rank=0, size=1)
    assert load_states(of, world, Checkpoint(3, {}, {"ranks": [rank]}, {})) == []
    assert torch.equal(of.model.weight, before.model.weight)
    world.size = 2
    (line,) = load_states(of, world, Checkpoint(3, dict(before.model.state_dict()), {"ranks": [rank]}, {}))
    assert line.startswith("the run had 1 rank with weights of their own: all begin with the mean of the weights")


def test_a_synchronous_rule_does_not_resume_an_asynchronous_one(tmp_path: Path) -> None:
    reply = Reply(7, 700, 600, workers=(WorkerProgress(4, 6), WorkerProgress(3, 5)))
    save(tmp_path / "checkpoints", centre_checkpoint(9, trainer().model.state_dict(), [reply], "these"))
    with pytest.raises(CheckpointError, match=r"step 9's checkpoint is that of an asynchronous rule, .* a new run"):
        resume_run(tmp_path, trainer(), WORLD)


class Counting(torch.nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


def test_the_mean_of_ranks_is_that_of_tensors() -> None:
    of = trainer()
    of.model, of.reducer.traits, of.reducer.sharded = Counting(3, 2), LocalSGD().traits, None
    of.reducer.rule_state = dict
    world: Any = SimpleNamespace(gather_object=lambda own: [own, own])
    weights, optimizer = states_of(of, world)
    assert torch.equal(weights["weight"], of.model.weight)
    assert weights["_extra_state"] == {"calls": 3}
    assert len(optimizer["ranks"]) == 2


@pytest.mark.parametrize("rule", [LocalSGD(Exchange(wire="int8")), DiLoCo()])
def test_ranks_without_an_anchor_begin_with_a_common_one(rule: LocalSGD | DiLoCo) -> None:
    """Those of `local_sgd` without a wire, resumed by a rule that counts changes since the anchor."""
    of, mean = trainer(), trainer().model.state_dict()
    of.reducer.traits = rule.traits
    own = trainer()
    kept: dict[str, Any] = {"cycle": [16], "first": 0, "kept": {}}
    rank = {"weights": own.model.state_dict(), "optimizer": own.optimizer.state_dict(), "rule": kept}
    world: Any = SimpleNamespace(rank=0, size=2)
    (line,) = load_states(of, world, Checkpoint(3, dict(mean), {"ranks": [rank, rank]}, {}))
    assert line.startswith("the run had 2 ranks with weights of their own: all begin with the mean of the weights")
    assert torch.equal(of.model.weight, mean["weight"])
    kept["kept"] = {"anchor": []}
    assert load_states(of, world, Checkpoint(3, dict(mean), {"ranks": [rank, rank]}, {})) == []
    assert torch.equal(of.model.weight, own.model.weight)


def test_a_disk_that_is_away_changes_nothing(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    weights = keep(tmp_path, 2) / "weights.safetensors"
    weights.unlink()
    weights.symlink_to("/nowhere/mounted")
    with pytest.raises(CheckpointError, match=r"cannot read .*a link to /nowhere/mounted"):
        resume_run(tmp_path, trainer(), WORLD)
    assert (steps(tmp_path), len(checkpoint_names(tmp_path / "checkpoints"))) == ([1, 2], 2)


def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path) -> None:
    for _ in range(2):
        point, incomplete, _ = resume_run(tmp_path, trainer(), WORLD)
        assert (point, incomplete) == (RunPoint(), [])
        check_change(recipe(optimizer={"name": "lamb"}), BEFORE, point, "these")
        assert discard_newer(tmp_path, point.step, incomplete) == []
        add_metrics(tmp_path, {"step": 23})  # it is killed before its checkpoint
    add_metrics(tmp_path, {"step": 46})
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*, but metrics of 2 epochs: is its disk not mounted"):
        resume_run(tmp_path, trainer(), WORLD)
    assert steps(tmp_path) == [23, 46]


def test_an_optimizer_keeps_the_options_of_the_recipe() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    before = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    before.step()
    now = torch.optim.SGD([parameter], 0.2, momentum=0.5, nesterov=True)
    model, programs = torch.nn.Module(), SimpleNamespace(resume=lambda step, rule: None)
    of: Any = SimpleNamespace(model=model, optimizer=now, reducer=SimpleNamespace(programs=programs))
    load_rank(of, 4, {}, before.state_dict())
    (group,) = now.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.2, 0.5, True)
    assert group["params"] == [parameter]
    assert torch.equal(now.state[parameter]["momentum_buffer"], torch.ones(2))
