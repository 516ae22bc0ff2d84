"""State of a run in its checkpoints: written by all ranks, loaded when it is resumed, and what may change then.

same weights everywhere    weights: rank 0's            optimizer: rank 0's; with shards, those of all ranks joined
layers that are split      weights: whole, gathered     optimizer: whole, gathered
weights that differ        weights: mean or anchor      optimizer: {"ranks": [rank 0's weights and states, ...]}

A rank's states are those of its optimizer and of the rule: anchor, outer momentum, residuals, changes in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unisono.errors import CheckpointError, RecipeError
from unisono.step.replica import ANCHOR
from unisono.step.rule import RankState
from unisono.tensor_parallel.model import split_of
from unisono.tensor_parallel.whole_state import cut_optimizer_state, whole_optimizer_state, whole_state_dict
from unisono.training import run_directory
from unisono.training.checkpoint.files import load_newest, rename_damaged
from unisono.training.checkpoint.layout import Checkpoint, DamagedCheckpoint, checkpoint_names
from unisono.training.events import RunPoint
from unisono.training.recipe import Recipe
from unisono.training.trainer import Trainer
from unisono.world import World

RANKS = "ranks"


def states_of(trainer: Trainer, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the optimizer state for a checkpoint. Called by all ranks together."""
    sharded = trainer.reducer.sharded
    if split_of(trainer.model) is not None:
        return whole_state_dict(trainer.model), whole_optimizer_state(trainer.model, trainer.optimizer)
    if sharded is not None:  # rank 0 alone needs memory for the whole state
        return trainer.model.state_dict(), sharded.state_dict(root=0)
    mine = trainer.model.state_dict(), trainer.optimizer.state_dict()
    if not trainer.reducer.traits.state.differs:
        return mine
    rule_state = trainer.reducer.rule_state()
    everyone = world.all_gather_object({"weights": dict(mine[0]), "optimizer": mine[1], "rule": rule_state})
    if trainer.reducer.traits.state is RankState.ANCHORED:
        with trainer.reducer.weights.averaged():
            return {name: _copy(one) for name, one in mine[0].items()}, {RANKS: everyone}
    weights = [one["weights"] for one in everyone]
    return {name: _mean([one[name] for one in weights]) for name in mine[0]}, {RANKS: everyone}


def load_states(trainer: Trainer, world: World, checkpoint: Checkpoint) -> list[str]:
    """Load a checkpoint into the model and the optimizer. Return lines to report.

    Raises the errors of `load_state_dict` where it does not fit.
    """
    ranks = checkpoint.optimizer.get(RANKS)
    if ranks is not None and len(ranks) == world.size and trainer.reducer.traits.state.differs:
        trainer.model.load_state_dict(ranks[world.rank]["weights"])
        load_optimizer(trainer.optimizer, ranks[world.rank]["optimizer"])
        trainer.reducer.programs.resume(checkpoint.step, ranks[world.rank].get("rule"))
        return []
    trainer.reducer.programs.resume(checkpoint.step)
    trainer.model.load_state_dict(checkpoint.weights)
    if ranks is None:
        own = cut_optimizer_state(trainer.model, trainer.optimizer, checkpoint.optimizer)
        load_optimizer(trainer.optimizer, own)
        return []
    anchored = any(ANCHOR in one.get("rule", {}).get("kept", ()) for one in ranks)
    begin = "the anchor, their weights after the last outer steps" if anchored else "the mean of the weights"
    return [
        f"the run had {len(ranks)} ranks with weights of their own: all begin with {begin}, and with no state of the "
        "optimizer"
    ]


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, which keeps its options: those of the recipe, which may be new."""
    options = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, option in zip(optimizer.param_groups, options, strict=True):
        group.update(option)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _mean(values: list[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    return torch.stack(values).mean(0)


def resume_run(folder: Path, trainer: Trainer, world: World) -> tuple[RunPoint, list[DamagedCheckpoint], list[str]]:
    """Load the newest complete checkpoint into the model and the optimizer.

    Return the resume point, the damaged checkpoints, and lines to log. A run without a checkpoint begins again.
    Nothing is changed on the disk. Called by all ranks together. Raises CheckpointError where no checkpoint is
    complete, one cannot be read, or it does not fit the model.
    """
    found = world.call_on_root(lambda: _read(folder))
    if found is None:
        return RunPoint(), [], []
    checkpoint, damaged = found
    try:
        notes = load_states(trainer, world, checkpoint)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:  # a model's own set_extra_state may raise any
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"step {checkpoint.step}'s checkpoint does not fit the recipe's model: {reason}; nothing was changed"
        ) from error
    progress = checkpoint.progress
    trainer.reducer.restore(progress["reducer" if "reducer" in progress else "meeting"])  # older releases: "meeting"
    before = progress["loss"] if trainer.world.rank == 0 else 0.0  # the sum of all samples counts once
    counters = progress["epoch"], progress["done"], checkpoint.step, before
    return RunPoint(*counters, progress["seconds"], progress["data"]), damaged, notes


def discard_newer(folder: Path, point: RunPoint, damaged: list[DamagedCheckpoint]) -> list[str]:
    """Remove metrics newer than the checkpoint to resume from, and rename damaged ones. Return lines to log."""
    run_directory.truncate_metrics(folder, point.step)
    notes = rename_unused(folder, damaged)
    begins = f"{folder} has no checkpoint yet: the run begins again"
    return [*notes, f"resumes after step {point.step}" if point.step else begins]


def rename_unused(folder: Path, damaged: Sequence[DamagedCheckpoint]) -> list[str]:
    """Rename damaged checkpoints of the run in `folder`. Return lines to log."""
    try:
        renamed = rename_damaged(folder / run_directory.CHECKPOINTS, damaged)
    except OSError as error:
        raise CheckpointError(f"cannot rename a damaged checkpoint: {error}; rename it, then resume again") from error
    return [f"{one}; it is now {new}, and the previous one is used" for one, new in zip(damaged, renamed, strict=True)]


def _read(folder: Path) -> tuple[Checkpoint, list[DamagedCheckpoint]] | None:
    """Return the newest complete checkpoint; None where the run had not written its first one.

    Raises CheckpointError where the metrics show that it had.
    """
    checkpoints = folder / run_directory.CHECKPOINTS
    if checkpoint_names(checkpoints):
        return load_newest(checkpoints)
    if (epochs := run_directory.count_metrics(folder)) > 1:  # one line may be written just before the first checkpoint
        raise CheckpointError(
            f"there is no checkpoint in {checkpoints}, but metrics of {epochs} epochs: is its disk not mounted? "
            "Nothing was changed; put the checkpoints there, or begin a new run in another folder"
        )
    return None


def check_change(before: Recipe, now: Recipe, point: RunPoint, data: str) -> None:
    """Raise RecipeError for changes that a run resumed at `point`, on data with the fingerprint `data`, cannot take.

    The kind of optimizer must stay, since its state does. Within an epoch the order of samples must stay too, or some
    would be seen twice and others never.
    """
    if point.step and before.optimizer.name != now.optimizer.name:
        raise RecipeError(
            f"optimizer.name = {now.optimizer.name!r}, but the run has the state of {before.optimizer.name!r}; "
            "a new run can have another"
        )
    if point.done and point.data != data:
        raise RecipeError(
            f"the run stopped {point.done} steps into an epoch of other data ({point.data}) than now ({data}); "
            "change it at the end of an epoch"
        )
    for table, key in (("training", "batch"), ("training", "seed"), ("data", "shuffle")):
        old, new = (getattr(getattr(recipe, table), key) for recipe in (before, now))
        if point.done and old != new:
            raise RecipeError(
                f"{table}.{key} = {new}, but the run stopped {point.done} steps into an epoch with {old}; "
                "change it at the end of an epoch"
            )
