"""Resumes a stopped run from its newest whole checkpoint, and refuses changes of the recipe that it cannot take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unisono.errors import CheckpointError, RecipeError
from unisono.training import run_directory
from unisono.training.checkpoint import Checkpoint, Torn, load_newest, names, set_aside
from unisono.training.rank_states import take_states
from unisono.training.recipe import Recipe
from unisono.training.trainer import Trainer
from unisono.world import World


@dataclass(frozen=True)
class Place:
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
    """Mark of the data that a resumed run was trained on."""


def go_on(folder: Path, trainer: Trainer, world: World) -> tuple[Place, list[Torn], list[str]]:
    """Load the newest whole checkpoint into the model and the optimizer.

    Return the place of the run, the torn checkpoints, and lines to report. A run without a checkpoint begins again.
    Nothing is changed on the disk. Called by all ranks together. Raises CheckpointError where no checkpoint is whole,
    one cannot be read, or it does not fit the model.
    """
    found = world.call_on_root(lambda: _read(folder))
    if found is None:
        return Place(), [], []
    checkpoint, torn = found
    try:
        options = [{**group, "params": []} for group in trainer.optimizer.param_groups]
        notes = take_states(trainer, world, checkpoint)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:  # a model's own set_extra_state may raise any
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"step {checkpoint.step}'s checkpoint does not fit the recipe's model: {reason}; nothing was changed"
        ) from error
    for group, option in zip(trainer.optimizer.param_groups, options, strict=True):  # the recipe's, which may be new
        group.update({key: value for key, value in option.items() if key != "params"})
    progress = checkpoint.progress
    trainer.reducer.restore(progress["meeting"])
    before = progress["loss"] if world.rank == 0 else 0.0  # the sum of all ranks counts once
    place = Place(progress["epoch"], progress["done"], checkpoint.step, before, progress["seconds"], progress["data"])
    return place, torn, notes


def clear(folder: Path, place: Place, torn: list[Torn]) -> list[str]:
    """Remove metrics newer than the checkpoint to resume from, and rename torn checkpoints. Return lines to report."""
    run_directory.forget_after(folder, place.step)
    try:
        renamed = set_aside(folder / run_directory.CHECKPOINTS, torn)
    except OSError as error:
        raise CheckpointError(f"cannot rename a torn checkpoint: {error}; rename it, then resume again") from error
    notes = [f"{one}; the one before it is used, and it is {new} now" for one, new in zip(torn, renamed, strict=True)]
    begins = f"{folder} has no checkpoint yet: it begins again"
    return [*notes, f"goes on after step {place.step}" if place.step else begins]


def _read(folder: Path) -> tuple[Checkpoint, list[Torn]] | None:
    """Return the newest whole checkpoint; None where the run had not written its first one.

    Raises CheckpointError where the metrics show that it had.
    """
    checkpoints = folder / run_directory.CHECKPOINTS
    if names(checkpoints):
        return load_newest(checkpoints)
    if (epochs := run_directory.count_metrics(folder)) > 1:  # one line may be written just before the first checkpoint
        raise CheckpointError(
            f"there is no checkpoint in {checkpoints}, but metrics of {epochs} epochs: is its disk not mounted? "
            "Nothing was changed; put the checkpoints there, or begin a new run in another folder"
        )
    return None


def check_change(before: Recipe, now: Recipe, place: Place, data: str) -> None:
    """Raise RecipeError for changes that a run resumed at `place`, on data with the mark `data`, cannot take.

    The kind of optimizer must stay, since its state does. Within an epoch the order of samples must stay too, or some
    would be seen twice and others never.
    """
    if place.step and before.optimizer.name != now.optimizer.name:
        raise RecipeError(
            f"optimizer.name = {now.optimizer.name!r}, but the run has the state of {before.optimizer.name!r}; "
            "a new run can have another"
        )
    if place.done and place.data != data:
        raise RecipeError(
            f"the run stopped {place.done} steps into an epoch of other data ({place.data}) than now ({data}); "
            "it can be changed at the end of an epoch alone"
        )
    for key in ("batch", "seed"):
        old, new = getattr(before.training, key), getattr(now.training, key)
        if place.done and old != new:
            raise RecipeError(
                f"training.{key} = {new}, but the run stopped {place.done} steps into an epoch with {old}; "
                "it can be changed at the end of an epoch alone"
            )
