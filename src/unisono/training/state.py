"""State of a run in its checkpoints: written by all ranks, loaded when it is resumed, and what may change then.

same weights everywhere    weights: rank 0's            optimizer: rank 0's; with shards, those of all ranks joined
layers that are split      weights: whole, gathered     optimizer: whole, gathered
weights that differ        weights: mean or anchor      optimizer: {"ranks": [rank 0's weights and states, ...]}

A rank's states are those of its optimizer and of the rule: anchor, outer momentum, residuals, changes in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from unisono.data.feed import has_other_classes, is_same_data
from unisono.errors import CheckpointError, RecipeError
from unisono.processor import HOST
from unisono.reducer.made_on import check_alike, code_of, difference_of_ranks, made_on, refuse, unlike
from unisono.step.replica import ANCHOR
from unisono.step.rule import RankState
from unisono.tensor_parallel.model import cut_optimizer_state, split_of, whole_optimizer_state, whole_state_dict
from unisono.training import run_directory
from unisono.training.checkpoint import files
from unisono.training.checkpoint.files import copied, load_newest, load_weights
from unisono.training.checkpoint.layout import Checkpoint, DamagedCheckpointError, checkpoint_names, step_of
from unisono.training.memory_copies import newest_copy
from unisono.training.recipe import Recipe
from unisono.training.recipe_check import user_functions
from unisono.training.trainer import Trainer
from unisono.uncaught import is_of_program
from unisono.world import World

LONGEST_REASON = 300
"""Characters that are shown of why a state does not fit."""

RANKS = "ranks"


@dataclass(frozen=True)
class RunPoint:
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
    made_on: str = ""
    """Processor and versions on which the bits of a resumed run depend; "" where an older release has not told."""


def states_of(trainer: Trainer, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights and the optimizer state for a checkpoint, whole on rank 0. Called by all ranks together."""
    sharded = trainer.reducer.sharded
    if split_of(trainer.model) is not None:
        return whole_state_dict(trainer.model), whole_optimizer_state(trainer.model, trainer.optimizer)
    if sharded is not None:  # rank 0 alone needs memory for the whole state
        return trainer.model.state_dict(), sharded.state_dict(root=0)
    states = trainer.model.state_dict(), trainer.optimizer.state_dict()
    if not trainer.reducer.traits.state.differs:
        return states
    rule_state = trainer.reducer.rule_state()
    rank_state = {"weights": states[0], "optimizer": states[1], "rule": rule_state}
    ranks = world.gather_object(copied(rank_state, HOST))  # a rank may not have the device of another
    if trainer.reducer.traits.state is RankState.ANCHORED:
        with trainer.reducer.weights.averaged():
            return copied(states[0]), {RANKS: ranks}
    weights = copy(states[0])
    weights.update((name, _mean([rank["weights"][name] for rank in ranks])) for name in states[0] if ranks)
    return weights, {RANKS: ranks}


def load_states(trainer: Trainer, world: World, checkpoint: Checkpoint) -> list[str]:
    """Load a checkpoint into the model and the optimizer. Return lines to report. Raises the errors of
    `load_state_dict` where it does not fit."""
    ranks, state = checkpoint.optimizer.get(RANKS), trainer.reducer.traits.state
    anchored = any(ANCHOR in rank.get("rule", {}).get("kept", ()) for rank in ranks or ())
    kept = state.differs and (anchored or not state.has_anchor)  # else each would begin with an anchor of its own
    if kept and ranks is not None and len(ranks) == world.size:
        load_rank(trainer, checkpoint.step, **ranks[world.rank])
        return []
    if ranks is None:
        optimizer = cut_optimizer_state(trainer.model, trainer.optimizer, checkpoint.optimizer)
        load_rank(trainer, checkpoint.step, checkpoint.weights, optimizer)
        return []
    load_rank(trainer, checkpoint.step, checkpoint.weights)
    begin = "the anchor, their weights after the last outer steps" if anchored else "the mean of the weights"
    return [
        f"the run had {len(ranks)} rank{'s' * (len(ranks) > 1)} with weights of their own: all begin with {begin}, and "
        "with no state of the optimizer"
    ]


def load_rank(
    trainer: Trainer,
    step: int,
    weights: dict[str, Any],
    optimizer: dict[str, Any] | None = None,
    rule: dict[str, Any] | None = None,
) -> None:
    """Load the weights of a rank after `step` steps, and if they are given the states of its rule and its optimizer,
    which keeps the recipe's options: they may be new."""
    load_weights(trainer.model, weights)
    if optimizer is not None:
        groups = trainer.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        trainer.optimizer.load_state_dict(optimizer)
        for group, option in zip(trainer.optimizer.param_groups, options, strict=True):
            group.update(option)
    trainer.reducer.programs.resume(step, rule)


def _mean(values: list[Any]) -> Any:
    averaged = isinstance(values[0], torch.Tensor) and (values[0].is_floating_point() or values[0].is_complex())
    return torch.stack(values).mean(0) if averaged else values[0]


def resume_run(
    folder: Path, trainer: Trainer, world: World, memory: Path | None = None
) -> tuple[RunPoint, list[DamagedCheckpointError], list[str]]:
    """Load the newest complete checkpoint, or a newer copy in `memory` of some host, into the model and the optimizer.
    Return the resume point, the damaged checkpoints, and lines to log. Collective.

    Nothing is changed on the disk. A run without a checkpoint begins again. Raises CheckpointError where none is
    complete, one cannot be read, or it does not fit the model.
    """
    copy = None if memory is None else newest_copy(memory, world)
    newest = world.call_on_root(lambda: find_checkpoint(folder) if copy is None else _newer(folder, copy))
    if newest is None or (checkpoint := newest[0] or copy) is None:
        return RunPoint(), [], []
    point, notes = load_checkpoint(checkpoint, trainer, world)
    return point, newest[1], notes


def _newer(folder: Path, copy: Checkpoint) -> tuple[Checkpoint | None, list[DamagedCheckpointError]]:
    """Return the newest complete checkpoint that is newer than a copy, if there is one, and the damaged ones before."""
    checkpoints = folder / run_directory.CHECKPOINTS
    names = [name for name in reversed(checkpoint_names(checkpoints)) if step_of(name) > copy.step]
    return files.load_first(checkpoints, names)


def load_checkpoint(checkpoint: Checkpoint, trainer: Trainer, world: World) -> tuple[RunPoint, list[str]]:
    """Load a checkpoint into the model and the optimizer. Return its point of the run, and lines to log."""
    if "servers" in checkpoint.progress:
        raise CheckpointError(
            f"step {checkpoint.step}'s checkpoint is that of an asynchronous rule, which a synchronous one cannot "
            "resume: resume by the run's own rule, or begin a new run"
        )
    with fitting(f"step {checkpoint.step}'s checkpoint"):
        notes = load_states(trainer, world, checkpoint)
    progress = checkpoint.progress
    trainer.reducer.restore(progress["reducer" if "reducer" in progress else "meeting"])  # older releases: "meeting"
    before = progress["loss"] if trainer.world.rank == 0 else 0.0  # the sum of all samples counts once
    counters = progress["epoch"], progress["done"], checkpoint.step, before
    return RunPoint(*counters, progress["seconds"], progress["data"], progress.get("made_on", "")), notes


def find_checkpoint(
    folder: Path, names: Sequence[str] | None = None
) -> tuple[Checkpoint, list[DamagedCheckpointError]] | None:
    """Return the first complete checkpoint of the run in `folder`, and the damaged ones before it; None where the run
    had not written its first one. `names` are those to try, in order; None: all, the newest first.

    Raises CheckpointError where none is complete, one cannot be read, or the metrics show that there were some.
    """
    checkpoints = folder / run_directory.CHECKPOINTS
    if checkpoint_names(checkpoints):
        return load_newest(checkpoints, names)
    metrics = folder / run_directory.METRICS  # half a line counts, too
    epochs = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
    if epochs > 1:  # one line may be written just before the first checkpoint
        raise CheckpointError(
            f"there is no checkpoint in {checkpoints}, but metrics of {epochs} epochs: is its disk not mounted? "
            "Nothing was changed; put the checkpoints there, or begin a new run in another folder"
        )
    return None


@contextmanager
def fitting(checkpoint: str, model: str = "model", remedy: str = "nothing was changed") -> Iterator[None]:
    """Within the block, turn the errors of `load_state_dict` into a CheckpointError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, LookupError) as error:  # a model's own set_extra_state may raise any
        reason = shorten(str(error), LONGEST_REASON, placeholder=" ...")  # PyTorch lists all entries
        raise CheckpointError(f"{checkpoint} does not fit the recipe's {model}: {reason}; {remedy}") from error


def discard_newer(folder: Path, step: int, damaged: Sequence[DamagedCheckpointError]) -> list[str]:
    """Remove checkpoints and lines of files that are newer than `step`, from which the run in `folder` resumes; rename
    damaged ones. Return lines to log."""
    notes = files.discard_newer(folder / run_directory.CHECKPOINTS, step, damaged)
    run_directory.truncate_lines(folder, step)
    return notes


def check_ranks(world: World, recipe: Recipe) -> None:
    """Raise UsageError where ranks do not compute the same bits, which virtual ranks promise. Collective."""
    if recipe.training.virtual_ranks:
        promise = f"training.virtual_ranks = {recipe.training.virtual_ranks}"
        check_alike(world, promise)
        if functions := user_functions(recipe):
            sources = [function.source() for function in functions]
            code = [code_of(source) for source in sources if source is not None and is_of_program(str(source))]
            refuse(promise, difference_of_ranks(world.all_gather_object(", ".join(code))))


def check_change(before: Recipe, now: Recipe, point: RunPoint, data: str) -> None:
    """Raise RecipeError for changes that a run resumed at `point`, on data with the fingerprint `data`, cannot take.

    The kind of optimizer must stay, since its state does. Within an epoch the order of samples must stay too, or some
    would be seen twice and others never. Where bits are promised, what they depend on must stay.
    """
    if now.training.virtual_ranks and point.made_on not in ("", here := made_on()):
        there, here = unlike(point.made_on, here)
        raise RecipeError(
            f"training.virtual_ranks = {now.training.virtual_ranks} promises the same bits, but the run was computed "
            f"with {there}, and would go on with {here}; resume there, or --set training.virtual_ranks=0"
        )
    if point.step and before.optimizer.name != now.optimizer.name:
        raise RecipeError(
            f"optimizer.name = {now.optimizer.name!r}, but the run has the state of {before.optimizer.name!r}; "
            "a new run can have another"
        )
    if has_other_classes(point.data, data):
        raise RecipeError(
            "the run was trained on other classes than the data have now, or in another order; pack them with "
            "the run's classes, or begin a new run"
        )
    if point.done and not is_same_data(point.data, data):
        if is_same_data(*_without_order(point.data, data)):
            raise RecipeError(
                f"the run stopped {point.done} steps into an epoch of these data in another order ({point.data}) than "
                f"now ({data}): set data.storage and data.buffer_megabytes to those that its log.txt names; "
                'data.storage = "auto" chooses by free memory'
            )
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


def _without_order(*fingerprints: str) -> Iterator[str]:
    return (", ".join(fingerprint.split(", ")[:2]) for fingerprint in fingerprints)


def describe_change(point: RunPoint, data: str) -> list[str]:
    """Return a line where a run resumed at `point` goes on with other data: `data` is their fingerprint."""
    before, now = _without_order(point.data, data)
    if not point.data or is_same_data(before, now):
        return []
    return [f"the run was trained on other data ({before}) than it goes on with ({now})"]
