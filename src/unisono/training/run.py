"""Runs a recipe on the ranks of a world: makes its parts, resumes a stopped run, trains.

lock ─ data ─ network ─ (newest whole checkpoint) ─ epochs
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from unisono.models.own import own_network
from unisono.own import is_own
from unisono.training import run_directory
from unisono.training.checkpoint import check_state
from unisono.training.epochs import Epochs
from unisono.training.making import keep_plan, known_plan, make_feed, make_trainer, say_format, take_cores
from unisono.training.progress import Report
from unisono.training.recipe import Recipe, check_run, own_rule
from unisono.training.resuming import Place, check_change, clear, go_on
from unisono.training.run_lock import RunLock
from unisono.training.signals import Signals
from unisono.training.timeline import Timeline, check_writable
from unisono.world import World


def train(recipe: Recipe, world: World, folder: Path | None, resume: Path | None, trace: Path | None = None) -> int:
    """Run `recipe` in `folder` (None: a new one under runs/), or resume the run in `resume`.

    `trace` is a file for the timeline of this run. The folder is locked meanwhile. Return the exit code: 0, or 143
    where SIGTERM ended the run after a step, with a checkpoint.
    """
    lock = RunLock()
    try:
        return _train(recipe, world, folder, resume, trace, lock)
    finally:
        lock.release()


def _train(
    recipe: Recipe, world: World, folder: Path | None, resume: Path | None, trace: Path | None, lock: RunLock
) -> int:
    begun = time.perf_counter()
    check_run(recipe, world.size)
    if trace is not None:
        world.call_on_root(lambda: check_writable(trace))
    if resume is not None:
        before = world.call_on_root(lambda: _open(resume, recipe, lock))
    share, said = take_cores(world)
    said.append(say_format(recipe, world))
    feed = make_feed(recipe, world, share)
    timeline = None if trace is None else Timeline(world)
    plan = known_plan(recipe, None if resume is None else resume / run_directory.CONVOLUTIONS, world)
    trainer = make_trainer(recipe, world, feed, timeline, plan)
    check_state(trainer.model, trainer.optimizer)
    place, notes, kept = Place(), list[str](), replace(recipe, ranks=world.size)
    if resume is None:
        home = world.call_on_root(lambda: run_directory.begin(kept, folder, lock))
    else:
        home = resume
        place, torn, notes = go_on(home, trainer, world)
        check_change(before, recipe, place, feed.mark)
        notes += world.call_on_root(lambda: clear(home, place, torn))
        world.call_on_root(lambda: run_directory.write_recipe(home, kept))
    keep_plan(recipe, home / run_directory.CONVOLUTIONS, plan, world)
    with Report(world.rank == 0, recipe.training.epochs) as report:
        for note in notes:
            report.say(note)
        on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
        report.say(f"{recipe.name}: {world.size} ranks on {on}, {feed.samples} samples, into {home}")
        for line in said:
            report.say(line)
        trainer.reducer.say(report.say)
        run = Epochs(recipe, world, feed, trainer, home, report, place, begun - place.seconds)
        with Signals(trainer.request, run.end, run.warn) as run.signals:
            code = run.finish()
    feed.close()
    if timeline is not None and trace is not None:
        timeline.write(trace)
    return code


def _open(folder: Path, recipe: Recipe, lock: RunLock) -> Recipe:
    """Lock the folder of a resumed run, and print the user code that it will run. Return the run's previous recipe."""
    before = run_directory.recipe_of(folder, [])
    lock.take(folder)
    for own in (own_network(recipe.model.name, recipe.model.folder), own_rule(recipe.rule)):
        if is_own(own.name):
            print(f"the run names code of its own, which is run now: {own.where()}", flush=True)
    return before
