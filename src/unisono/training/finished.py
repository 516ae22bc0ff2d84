"""Answer to `--resume` of a run that has ended. Needs neither PyTorch nor MPI."""

from __future__ import annotations

from pathlib import Path

from unisono.training.checkpoint import DamagedCheckpoint, checkpoint_names, read_manifest, step_of
from unisono.training.recipe import Recipe
from unisono.training.run_directory import CHECKPOINTS, read_metrics


def is_finished(run: Path, epochs: int) -> bool:
    """Return True where the run in `run` has metrics of `epochs` epochs, and the last one's checkpoint is complete."""
    names, metrics = checkpoint_names(run / CHECKPOINTS), read_metrics(run)
    if (
        not names
        or not metrics
        or metrics[-1].get("epoch", 0) < epochs
        or metrics[-1].get("step") != step_of(names[-1])
    ):
        return False
    return not isinstance(read_manifest(run / CHECKPOINTS / names[-1]), DamagedCheckpoint)


def report_if_finished(run: Path, recipe: Recipe) -> bool:
    """Return True where the run in `run` has all epochs of its recipe, and print a line that names what to set."""
    epochs = recipe.training.epochs
    if not is_finished(run, epochs):
        return False
    print(
        f"{run} is finished, with training.epochs = {epochs}; to train longer, add --set training.epochs=N, with N "
        f"above {epochs}",
        flush=True,
    )
    return True
