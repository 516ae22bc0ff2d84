"""Resumes a stopped run from its newest complete checkpoint, and refuses recipe changes that it cannot take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import CheckpointError, RecipeError
from unisono.training import run_directory
from unisono.training.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_names,
    load_newest,
    rename_damaged,
)
from unisono.training.rank_states import load_states
from unisono.training.recipe import Recipe
from unisono.training.trainer import Trainer
from unisono.world import World


@dataclass(frozen=True)
class ResumePoint:
    """Progress of a run: `step` steps in all, `done` of them in `epoch`.

    `loss` is the sum of the loss over this rank's samples of the epoch so far.
    """

    epoch: int = 0
    done: int = 0
    step: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    """Seconds that the run had taken when it stopped; 0 for a new run."""
    data: str = ""
    """Fingerprint of the data that a resumed run was trained on."""


def resume_run(folder: Path, trainer: Trainer, world: World) -> tuple[ResumePoint, list[DamagedCheckpoint], list[str]]:
    """Load the newest complete checkpoint into the model and the optimizer.

    Return the resume point, the damaged checkpoints, and lines to log. A run without a checkpoint begins again.
    Nothing is changed on the disk. Called by all ranks together. Raises CheckpointError where no checkpoint is
    complete, one cannot be read, or it does not fit the model.
    """
    found = world.call_on_root(lambda: _read(folder))
    if found is None:
        return ResumePoint(), [], []
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
    point = ResumePoint(
        progress["epoch"], progress["done"], checkpoint.step, before, progress["seconds"], progress["data"]
    )
    return point, damaged, notes


def discard_newer(folder: Path, point: ResumePoint, damaged: list[DamagedCheckpoint]) -> list[str]:
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


def check_change(before: Recipe, now: Recipe, point: ResumePoint, data: str) -> None:
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
