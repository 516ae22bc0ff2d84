"""Recomputation of a step of a run from the nearest checkpoint before it, on any ranks: `unisono audit`.

chain.jsonl    │ 1 │ 2 │ ... │ 32 │ 33 │ 34 │ ... │ 40 │ 41 │
checkpoints                     ▲ loaded             │
this                              33   34   ...   40 ▼  hashes are compared; the first step that differs is reported
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from unisono.data.feed import Feed, is_same_data
from unisono.errors import UsageError
from unisono.reducer.made_on import made_on
from unisono.training import run_directory
from unisono.training.audit import Audit
from unisono.training.chain import StepHashes, difference, read_chain, recipe_digest
from unisono.training.checkpoint.files import load_newest
from unisono.training.checkpoint.layout import Checkpoint, checkpoint_names, step_of
from unisono.training.player import Draw, EventPlayer, TogetherPlayer, TrainStep, fixed_order
from unisono.training.recipe import Recipe
from unisono.training.recipe_check import make_rule
from unisono.training.run import Run, make_parts
from unisono.training.state import RunPoint, load_checkpoint
from unisono.world import World


def check_chain(folder: Path, recipe: Recipe, step: int | None) -> tuple[dict[int, dict[str, Any]], int, int]:
    """Return the lines of a run's steps, by their numbers, the number of the step to recompute, None: the last, and
    after how many steps the run began or went on by that step's recipe.

    Raises AuditError for a chain that was edited, and UsageError where it has no such step, or not of this recipe.
    """
    path = folder / run_directory.CHAIN
    chain = read_chain(path)
    if not any("samples" in line for line in chain):
        raise UsageError(f"{path} has no steps: train with --set audit.chain=true")
    lines = {line["step"]: line for line in chain if "samples" in line}
    wanted = max(lines) if step is None else step
    if wanted not in lines:
        raise UsageError(f"--step {wanted}: {path} has steps {min(lines)} to {max(lines)}")
    begins = [line for line in chain if "recipe" in line]
    begun = [line for line in begins if line["step"] < wanted][-1]
    if begun["recipe"] != recipe_digest(recipe):
        later = [line["step"] for line in begins if line["step"] >= wanted]
        raise UsageError(
            f"--step {wanted} was made by another recipe than {folder / run_directory.RECIPE} is now"
            + (f": audit a step after {max(later)}" if later else ": put the recipe of that run there")
        )
    return lines, wanted, begun["step"]


def recompute(folder: Path, recipe: Recipe, world: World, step: int | None) -> tuple[str, bool]:
    """Recompute a step, None: the last of the chain. Return a line that says how it is the same, or what differs first;
    and True where it is the same. Raises UsageError where the step cannot be recomputed: its checkpoints are gone, or
    the data are others. Collective."""
    lines, wanted, first = world.call_on_root(lambda: check_chain(folder, recipe, step))
    feed, trainer, _, _ = make_parts(recipe, world, make_rule(recipe), None, folder)
    assert isinstance(feed, Feed), "ranks that train together have batches"
    run = Run(recipe, world, feed, trainer, folder, time.perf_counter())
    player, hashes = TogetherPlayer(run), list[StepHashes]()
    checkpoint = world.call_on_root(lambda: _newest_before(wanted, folder))
    point = RunPoint() if checkpoint is None else load_checkpoint(checkpoint, trainer, world)[0]
    if point.step < first:
        raise UsageError(
            f"--step {wanted} can only be recomputed from a checkpoint of step {first} or later, which is gone: "
            "its part of the chain begins there; audit a later step"
        )
    if point.done and not is_same_data(point.data, feed.fingerprint):
        raise UsageError(
            f"--step {wanted} was made from other data ({point.data}) than there are now ({feed.fingerprint}): "
            "put the run's data back"
        )
    run.audit = Audit(trainer, recipe.training.seed, 0.0, hashes.append)
    source = f"the checkpoint of step {point.step}" if point.step else "the seed"
    if point.step in lines and run.audit.weights() != lines[point.step]["weights"]:
        return f"{source} is not the same: its weights are not those that the step has left", False
    where = f"recomputed from {source} on {world.size} rank{'s' * (world.size > 1)}"
    if point.made_on not in ("", here := made_on()):
        where += f" with {here} instead of {point.made_on}"
    for event in fixed_order(recipe, feed.samples, world.rank, point, dict, str):
        if isinstance(event, Draw):
            player.play([event])
        if isinstance(event, TrainStep):
            EventPlayer.step(player, event)  # of which nothing is written or shown
            made = event.number + 1
            differing = world.call_on_root(lambda: difference(lines[made], hashes.pop()) if made in lines else "")  # noqa: B023
            if differing:
                return f"step {made} is not the same, {where}; what differs first: {differing}", False
            if made == wanted:
                feed.close()
                same = f"step {wanted} is the same, {where}: samples, gradients, weights"
                return f"{same}; chain {lines[wanted]['chain']}", True
    raise UsageError(
        f"--step {wanted}: the recipe's epochs of {feed.samples} samples end before it: put the run's data back"
    )


def _newest_before(step: int, home: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint from before a step, if there is one."""
    folder = home / run_directory.CHECKPOINTS
    names = [name for name in reversed(checkpoint_names(folder)) if step_of(name) < step]
    return load_newest(folder, names)[0] if names else None
