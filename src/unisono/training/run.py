"""Runs a recipe on the ranks of a world: makes its parts, resumes a stopped run, trains.

lock ─ data ─ network ─ (newest complete checkpoint) ─ epochs
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from unisono.data.feed import Feed, FeedFacts
from unisono.errors import UsageError
from unisono.foresight.ledger import check_appendable
from unisono.models import user_network
from unisono.plan.split import describe_borders
from unisono.rules.asynchronous import has_servers
from unisono.tensor_parallel.model import split_of
from unisono.tensor_parallel.plan import AUTO
from unisono.training import run_directory
from unisono.training.build import (
    bind_cores,
    describe_precision,
    load_plan,
    make_feed,
    make_rule,
    make_trainer,
    save_plan,
)
from unisono.training.checkpoint import check_state
from unisono.training.choose_layers import choose_layers
from unisono.training.epochs import TrainingLoop
from unisono.training.finished import report_if_finished
from unisono.training.foresight import RunForesight
from unisono.training.named_rule import describe_unused
from unisono.training.progress import ProgressDisplay
from unisono.training.recipe import Recipe
from unisono.training.recipe_check import check_run, own_rule, plan_of
from unisono.training.resume import ResumePoint, check_change, discard_newer, resume_run
from unisono.training.run_lock import RunLock
from unisono.training.signals import SignalHandlers
from unisono.training.timeline import Timeline, check_writable
from unisono.training.trainer import Trainer
from unisono.training.workers.run import AsynchronousRun, make_worker_feed
from unisono.user_function import is_user_function
from unisono.world import World


def train(
    recipe: Recipe,
    world: World,
    folder: Path | None,
    resume: Path | None,
    trace: Path | None = None,
    replay: Path | None = None,
    machine: str | None = None,
    ledger: Path | None = None,
    verbose: bool = False,
) -> int:
    """Run `recipe` in `folder` (None: a new one under runs/), or resume the run in `resume`.

    `trace` is a file for the timeline of this run; `replay` the asynchronous run that is replayed. `machine` predicts
    the run before its first step; `ledger` is the file for prediction and measurement (None: beside the folder).
    `verbose` shows the details that are otherwise in the run's log file alone. The folder is locked meanwhile. Return
    the exit code: 0, or 143 where SIGTERM ended the run after a step, with a checkpoint.
    """
    if resume is not None and world.call_on_root(lambda: report_if_finished(resume, recipe)):
        return 0
    lock = RunLock()
    try:
        return _train(recipe, world, folder, resume, trace, replay, machine, ledger, verbose, lock)
    finally:
        lock.release()


def _train(
    recipe: Recipe,
    world: World,
    folder: Path | None,
    resume: Path | None,
    trace: Path | None,
    replay: Path | None,
    machine: str | None,
    ledger: Path | None,
    verbose: bool,
    lock: RunLock,
) -> int:
    begun = time.perf_counter()
    check_run(recipe, world.size)
    if trace is not None:
        world.call_on_root(lambda: check_writable(trace))
    if ledger is not None:
        world.call_on_root(lambda: check_appendable(ledger))
    before = None if resume is None else world.call_on_root(lambda: _open(resume, recipe, lock))
    rule = make_rule(recipe)
    if replay is not None and not has_servers(rule):
        raise UsageError(f"--replay {replay}: its rule, {recipe.rule.name}, is synchronous; run its recipe again")
    share, lines = bind_cores(world)
    lines += [describe_precision(recipe, world), *describe_unused(recipe.rule)]
    workers = rule if has_servers(rule) else None
    layers = plan_of(recipe, world.size)
    timeline = None if trace is None else Timeline(world)
    observe = None if timeline is None else timeline.add
    feed = (
        make_feed(recipe, world, share, observe=observe)
        if workers is None
        else make_worker_feed(recipe, workers, world, share, observe)
    )
    if recipe.parallel.layers == AUTO:
        layers, chosen = choose_layers(recipe, world, feed, rule)
        lines += chosen
    lines += feed.notes
    source = resume or replay
    plan = load_plan(recipe, None if source is None else source / run_directory.CONVOLUTIONS, world)
    trainer = make_trainer(recipe, world, feed, rule, layers, timeline, plan)
    split = split_of(trainer.model)
    if recipe.parallel.layers != AUTO and split is not None and split.plan.words:
        lines += [f"layers split: {split.plan}", describe_borders(split.plan.words)]
    check_state(trainer.model, trainer.optimizer)
    kept = replace(recipe, ranks=world.size)
    home = resume or world.call_on_root(lambda: run_directory.create_run(kept, folder, lock))
    point, notes = ResumePoint(), list[str]()
    if before is not None and workers is None:
        point, notes = _resume(home, recipe, before, world, feed, trainer)
    if before is not None:
        world.call_on_root(lambda: run_directory.write_recipe(home, kept))
    save_plan(recipe, home / run_directory.CONVOLUTIONS, plan, world)
    on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
    notes += [f"{recipe.name}: {world.size} ranks on {on}, {feed.samples} samples, into {home}", *lines]
    if workers is not None:
        unsealed = f"no prediction is sealed: rule {recipe.rule.name} has no step that all ranks make together"
        notes += [] if machine is None else [unsealed]
        run = AsynchronousRun(recipe, workers, world, feed, trainer, home, begun, notes, timeline, replay)
        code = run.run(before)
    else:
        assert isinstance(feed, Feed), "all ranks have batches"
        code = _train_together(recipe, world, feed, trainer, home, begun, point, notes, machine, ledger, verbose)
    if timeline is not None and trace is not None:
        timeline.write(trace)
    return code


def _resume(
    home: Path, recipe: Recipe, before: Recipe, world: World, feed: FeedFacts, trainer: Trainer
) -> tuple[ResumePoint, list[str]]:
    """Load the newest checkpoint. Return the point to resume from, and lines to log."""
    point, damaged, notes = resume_run(home, trainer, world)
    check_change(before, recipe, point, feed.fingerprint)
    return point, notes + world.call_on_root(lambda: discard_newer(home, point, damaged))


def _train_together(
    recipe: Recipe,
    world: World,
    feed: Feed,
    trainer: Trainer,
    home: Path,
    begun: float,
    point: ResumePoint,
    notes: list[str],
    machine: str | None,
    ledger: Path | None,
    verbose: bool,
) -> int:
    """Train by a rule that all ranks follow together. Return the exit code."""
    log_file = home / run_directory.LOG
    with ProgressDisplay(world.rank == 0, recipe.training.epochs, verbose=verbose, log_file=log_file) as display:
        for note in notes:
            display.log(note)
        trainer.reducer.programs.log_with(display.log, display.detail)
        foresight = RunForesight(recipe, world, feed, trainer, home, display.log, display.detail, ledger)
        foresight.begin(machine, point.step)
        run = TrainingLoop(recipe, world, feed, trainer, home, display, point, begun - point.seconds, foresight)
        with SignalHandlers(trainer.request, run.end, run.warn) as run.signals:
            code = run.finish()
    feed.close()
    return code


def _open(folder: Path, recipe: Recipe, lock: RunLock) -> Recipe:
    """Lock the folder of a resumed run, and print the user code that it will run. Return the run's previous recipe."""
    before = run_directory.recipe_of(folder, [])
    lock.take(folder)
    for own in (user_network(recipe.model.name, recipe.model.folder), own_rule(recipe.rule)):
        if is_user_function(own.name):
            print(f"the run imports user code: {own.where()}", flush=True)
    return before
