"""Saved state of a run that scoring needs: recipe, newest weights, timings of convolutions; its network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.compute.convolution_plan import ConvolutionPlan, Times, machine, read_plan
from unisono.compute.prepare import prepare
from unisono.data.feed import InputFacts
from unisono.data.loading import PROCESSOR
from unisono.errors import CheckpointError
from unisono.models import user_network
from unisono.processor import HOST, processor
from unisono.training import run_directory
from unisono.training.build import make_model
from unisono.training.checkpoint.files import load_newest
from unisono.training.checkpoint.layout import checkpoint_names
from unisono.training.recipe import Recipe
from unisono.user_function import is_user_function


@dataclass(frozen=True)
class SavedRun:
    """A run as its folder has it."""

    folder: Path
    recipe: Recipe
    step: int
    """Steps that the newest complete checkpoint was made after; with an asynchronous rule, of all workers."""
    weights: dict[str, Any]
    """State of the network in that checkpoint."""
    timings: dict[str, Times]
    """Timings of convolution algorithms that the run chose by; empty if they are of another machine."""
    notes: tuple[str, ...]
    """Lines to report: damaged checkpoints, code of the user."""


def read_run(folder: Path) -> SavedRun:
    """Return the saved state of the run in `folder`; nothing on the disk is changed.

    Raises UsageError where it holds no run, CheckpointError where it has no complete checkpoint or one cannot be read.
    """
    recipe = run_directory.past_recipe(folder)
    checkpoints = folder / run_directory.CHECKPOINTS
    if not checkpoint_names(checkpoints):
        raise CheckpointError(
            f"{folder} has no checkpoint yet: it is written at the end of an epoch; train on with unisono train "
            f"--resume {folder}"
        )
    found, damaged = load_newest(checkpoints)
    notes = [f"{one}; the previous one is used" for one in damaged]
    own = user_network(recipe.model.name, recipe.model.folder)
    if is_user_function(own.name):
        notes.append(f"the run imports user code: {own.where()}")
    timings = read_plan(folder / run_directory.CONVOLUTIONS, machine(processor().name))
    return SavedRun(folder, recipe, found.step, found.weights, timings, tuple(notes))


def load_network(run: SavedRun, facts: InputFacts, device: torch.device = PROCESSOR) -> torch.nn.Module:
    """Return the run's network with the weights of the checkpoint, in evaluation mode, for inputs of these `facts`.

    Convolutions on a processor use the algorithms of the run. Raises CheckpointError where the weights do not fit.
    """
    model = make_model(run.recipe, facts, device)
    if run.recipe.compute.convolutions == "autotune" and device.type == HOST:
        plan = ConvolutionPlan()
        plan.freeze(run.timings)
        prepare(model, plan)
    try:
        model.load_state_dict(run.weights)
    except (RuntimeError, ValueError, TypeError, LookupError) as error:  # a model's own set_extra_state may raise any
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"step {run.step}'s checkpoint in {run.folder} does not fit the recipe's network: {reason}; give the "
            "network the code that it was trained with"
        ) from error
    return model.eval()
