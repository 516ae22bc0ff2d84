"""Runs a recipe on the ranks of a world: makes its parts, resumes a stopped run, trains.

lock ─ data ─ network ─ (newest complete checkpoint) ─ events of the run
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.data.feed import FeedFacts
from unisono.errors import UsageError
from unisono.files import check_appendable
from unisono.models import user_network
from unisono.plan.layer_plan import AUTO
from unisono.plan.split import describe_borders
from unisono.rules import BaseRule
from unisono.rules.asynchronous import has_servers
from unisono.tensor_parallel.model import split_of
from unisono.training import build, run_directory
from unisono.training.audit import Audit
from unisono.training.chain import Chain, recipe_digest
from unisono.training.checkpoint.files import check_state
from unisono.training.player import EventPlayer, Run, TogetherPlayer, TrainOptions
from unisono.training.recipe import AuditRecipe, Recipe, make_rule, own_rule, threads_of
from unisono.training.recipe_check import check_run, describe_unused, describe_wire, plan_of
from unisono.training.run_directory import RunLock, report_if_finished
from unisono.training.state import check_alike
from unisono.training.timeline import Timeline
from unisono.training.trainer import Trainer
from unisono.training.worker import WorkerPlayer
from unisono.user_function import is_user_function
from unisono.world import World


def train(recipe: Recipe, world: World, options: TrainOptions) -> int:
    """Run `recipe`, whose folder is locked meanwhile. Called by all ranks together.

    Return the exit code: 0, or 143 where SIGTERM ended the run after a step, with a checkpoint.
    """
    resume = options.resume
    if resume is not None and world.call_on_root(lambda: report_if_finished(resume, recipe)):
        return 0
    lock = RunLock() if options.memory is None else None  # else the command that starts the ranks holds one
    try:
        return _train(recipe, world, options, lock)
    finally:
        if lock is not None:
            lock.release()


def _train(recipe: Recipe, world: World, options: TrainOptions, lock: RunLock | None) -> int:
    began, resume, trace = time.perf_counter(), options.resume, options.trace
    check_run(recipe, world.size)
    for file, words in ((trace, "write the timeline"), (options.ledger, "append to the ledger")):
        if file is not None:
            world.call_on_root(partial(check_appendable, file, f"cannot {words} {file}"))
    before = None if resume is None else world.call_on_root(lambda: _open(resume, recipe, lock))
    rule = make_rule(recipe)
    if options.replay is not None and not has_servers(rule):
        raise UsageError(
            f"--replay {options.replay}: its rule, {recipe.rule.name}, is synchronous; run its recipe again"
        )
    timeline = None if trace is None else Timeline(world)
    feed, trainer, plan, lines = make_parts(recipe, world, rule, timeline, resume or options.replay)
    kept = replace(recipe, ranks=world.size)
    home = resume or world.call_on_root(lambda: run_directory.create_run(kept, options.folder, lock))
    on = "1 node" if world.nodes == 1 else f"{world.nodes} nodes"
    lines.insert(0, f"{recipe.name}: {world.size} ranks on {on}, {feed.samples} samples, into {home}")
    run = Run(recipe, world, feed, trainer, home, began, options, timeline, lines)
    player: EventPlayer = WorkerPlayer(run, rule) if has_servers(rule) else TogetherPlayer(run)
    player.begin(before)
    if before is not None:
        world.call_on_root(lambda: run_directory.write_recipe(home, kept))
    run.audit = _open_audit(run, player)
    build.save_plan(recipe, home / run_directory.CONVOLUTIONS, plan, world)
    code = player.train()
    if timeline is not None and trace is not None:
        timeline.write(trace)
    return code


def _open_audit(run: Run, player: EventPlayer) -> Audit | None:
    """Return the audit of a run that begins where the player is; None where its recipe has none. Collective."""
    options, training, chain = run.recipe.audit, run.recipe.training, Chain(run.home)
    if not isinstance(player, TogetherPlayer) or options == AuditRecipe():
        return None
    audit = Audit(run.trainer, training.seed, options.fraction, chain.add if options.chain else None)
    if options.chain:
        weights = audit.weights()
        run.world.call_on_root(lambda: chain.begin(player.made, recipe_digest(run.recipe), weights))
    return audit


def make_parts(
    recipe: Recipe, world: World, rule: BaseRule, timeline: Timeline | None, source: Path | None
) -> tuple[FeedFacts, Trainer, ConvolutionPlan, list[str]]:
    """Return the feed, the trainer and the convolution timings of a run, and lines to report.

    `source` is the folder of the run that is resumed or replayed.
    """
    share, lines = build.bind_cores(world, threads_of(recipe))
    device = build.take_device(recipe.compute.device, world)
    if recipe.training.virtual_ranks:
        check_alike(world, recipe.training.virtual_ranks)
    lines += [*build.describe_precision(recipe, world, device), *describe_unused(recipe.rule)]
    lines += describe_wire(recipe, world.nodes)
    observe = None if timeline is None else timeline.add
    feed = build.make_feed(recipe, world, share, rule, observe, device)
    layers = plan_of(recipe, world.size)
    if recipe.parallel.layers == AUTO:
        choice = build.choose_layers(recipe, world, feed, rule, device)
        layers, lines = choice.plan, lines + choice.lines
    lines += feed.notes
    plan = build.load_plan(recipe, None if source is None else source / run_directory.CONVOLUTIONS, world)
    trainer = build.make_trainer(recipe, world, feed, rule, layers, timeline, plan, device)
    split = split_of(trainer.model)
    if recipe.parallel.layers != AUTO and split is not None and split.plan.splits:
        lines += [f"layers split: {split.plan}", describe_borders(split.plan.splits)]
    check_state(trainer.model, trainer.optimizer)
    return feed, trainer, plan, lines


def _open(folder: Path, recipe: Recipe, lock: RunLock | None) -> Recipe:
    """Lock the folder of a resumed run, and print the user code that it will run. Return the run's previous recipe."""
    before = run_directory.past_recipe(folder)
    if lock is not None:
        lock.take(folder)
    for own in (user_network(recipe.model.name, recipe.model.folder), own_rule(recipe.rule)):
        if is_user_function(own.name):
            print(f"the run imports user code: {own.where()}", flush=True)
    return before
