"""Run of a recipe on the ranks of a world: its parts are made, a stopped run is resumed, and it trains.

lock ─ cores, device ─ feed ─ (layers to split) ─ network ─ a warm-up step, with autotuned convolutions ─ trainer
     ─ (newest complete checkpoint) ─ events of the run (`player.py`, `worker.py`)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.binding import CoreShare, bind, report, shares_of
from unisono.compute.convolution_plan import ConvolutionPlan, load_plan, save_plan
from unisono.compute.prepare import StepContext, autocast_to, choose_dtype, prepare
from unisono.data.builtin import BUILTIN_DATASETS, in_memory_feed
from unisono.data.feed import Feed, FeedFacts, packed_feed
from unisono.data.loading import Batch, InputFacts, cast_inputs, device_of_rank, to_device
from unisono.data.options import DataOptions
from unisono.device import module_of
from unisono.engine import Observe
from unisono.errors import RecipeError, UsageError
from unisono.files import check_appendable
from unisono.formats import counted
from unisono.launch import available_cores
from unisono.models import make_network
from unisono.optimizers import make_optimizer
from unisono.plan.layer_plan import AUTO
from unisono.plan.loading import MAX_DECODING_THREADS
from unisono.plan.split import describe_borders
from unisono.plan.trace import MODEL_ERRORS
from unisono.processor import HOST, processor
from unisono.rules import BaseRule
from unisono.rules.asynchronous import has_servers
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.choose_plan import PlanChoice, choose_plan
from unisono.tensor_parallel.model import refusal, split_model, split_of
from unisono.training import run_directory
from unisono.training.accuracy import Accuracy
from unisono.training.audit import Audit
from unisono.training.chain import Chain, recipe_digest
from unisono.training.checkpoint.files import check_state
from unisono.training.measures import last_line, result_metrics
from unisono.training.player import EventPlayer, TogetherPlayer
from unisono.training.progress import ProgressDisplay
from unisono.training.recipe import AuditRecipe, Recipe, threads_of
from unisono.training.recipe_check import (
    check_run,
    describe_unused,
    describe_unused_data,
    describe_wire,
    make_rule,
    plan_of,
    user_functions,
)
from unisono.training.run_directory import RunLock, report_if_finished
from unisono.training.signals import STOPPED
from unisono.training.state import check_ranks
from unisono.training.timeline import Timeline
from unisono.training.trainer import Trainer, warm_up
from unisono.training.worker import WorkerPlayer
from unisono.world import World

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run beside its recipe."""

    folder: Path | None = None
    """Folder of a new run; None for a new one under runs/."""
    resume: Path | None = None
    """Folder of the run that is resumed."""
    trace: Path | None = None
    """File for the timeline."""
    replay: Path | None = None
    """Folder of the asynchronous run that is replayed."""
    machine: str | None = None
    """Machine that the run is predicted for before its first step."""
    ledger: Path | None = None
    """File for prediction and measurement; None for that beside the run's folder."""
    memory: Path | None = None
    """Folder for copies of the state in memory, from which the next ranks go on; None for none."""
    verbose: bool = False
    """True to show the details that are otherwise in the run's log file alone."""


@dataclass
class Run:
    """Parts of a run, made on all ranks together."""

    recipe: Recipe
    world: World
    feed: FeedFacts
    """Batches, or of a rank that only serves their facts."""
    trainer: Trainer
    home: Path
    began: float
    """Start of the run on `time.perf_counter`, as if the run had never stopped."""
    options: TrainOptions = field(default_factory=TrainOptions)
    timeline: Timeline | None = None
    notes: list[str] = field(default_factory=list)
    """Lines to report at the start."""
    audit: Audit | None = None
    """Hashes of the steps, and shares that are computed again; None for neither."""

    def __post_init__(self) -> None:
        self.alone = has_servers(self.trainer.reducer.rule)
        """True where each rank tests, writes and reports for itself."""
        self.writes = self.alone or self.world.rank == 0
        log_file = None if self.alone else self.home / run_directory.LOG
        epochs, verbose = self.recipe.training.epochs, self.options.verbose
        self.display = ProgressDisplay(self.writes, epochs, not self.alone, verbose, log_file)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, without the time in which it was stopped."""
        return time.perf_counter() - self.began

    def awaited(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Return batches on the device and in the number format of the weights; the time until each is there counts as
        loading."""
        return self.trainer.awaited(to_device(batches, self.trainer.device), DTYPES[self.recipe.model.dtype])

    def end_at_once(self, after: str = "") -> None:
        """End all ranks at once, after a second SIGTERM."""
        self.world.abort(STOPPED, f"unisono: rank {self.world.rank}: a second SIGTERM: ended at once{after}\n")

    def warn(self, line: str) -> None:
        """Print a warning about a step that takes long after a signal, on the rank that got the signal."""
        print(f"unisono: rank {self.world.rank}: {line}", file=sys.stderr, flush=True)

    def results(self, accuracy: Accuracy, samples: float, seconds: float) -> dict[str, Any]:
        """Return the metrics of a test, and of `samples` samples that were trained on in `seconds`."""
        return result_metrics(accuracy, samples / max(seconds, 1e-9), self.feed.labels_per_sample)

    def report_last(self, results: dict[str, Any]) -> None:
        """Print the folder of the run, and the line that scripts read."""
        self.display.log(f"run: {self.home}")
        self.display.log(last_line(results))


def train(recipe: Recipe, world: World, options: TrainOptions) -> int:
    """Run `recipe`, whose folder is locked meanwhile. Return the exit code: 0, or 143 where SIGTERM ended the run after
    a step, with a checkpoint. Collective."""
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
    began, resume, replay, trace = time.perf_counter(), options.resume, options.replay, options.trace
    check_run(recipe, world.size)
    for file, action in ((trace, "write the timeline"), (options.ledger, "append to the ledger")):
        if file is not None:
            world.call_on_root(partial(check_appendable, file, f"cannot {action} {file}"))
    before = None if resume is None else world.call_on_root(lambda: _open(resume, recipe, lock))
    rule = make_rule(recipe)
    if replay is not None and not has_servers(rule):
        raise UsageError(f"--replay {replay}: its rule, {recipe.rule.name}, is synchronous; run its recipe again")
    timeline = None if trace is None else Timeline(world)
    feed, trainer, plan, lines = make_parts(recipe, world, rule, timeline, resume or replay)
    kept = replace(recipe, ranks=world.size)
    home = resume or world.call_on_root(lambda: run_directory.create_run(kept, options.folder, lock))
    on = f"{counted(world.size, 'rank')} on {counted(world.nodes, 'node')}"
    lines.insert(0, f"{recipe.name}: {on}, {feed.samples} samples, into {home}")
    run = Run(recipe, world, feed, trainer, home, began, options, timeline, lines)
    player: EventPlayer = WorkerPlayer(run, rule) if has_servers(rule) else TogetherPlayer(run)
    player.begin(before)
    if before is not None:
        world.call_on_root(lambda: run_directory.write_recipe(home, kept))
    run.audit = _open_audit(run, player)
    save_plan(recipe.compute.plan, home / run_directory.CONVOLUTIONS, plan, world)
    try:
        code = player.train()
    except KeyboardInterrupt:
        if options.memory is None and world.rank == 0:  # else the command that starts the ranks says it
            run.display.log(f"resume with: unisono train --resume {home}")
        raise
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


def _open(folder: Path, recipe: Recipe, lock: RunLock | None) -> Recipe:
    """Lock the folder of a resumed run, and print the user code that it will run. Return the run's previous recipe."""
    before = run_directory.past_recipe(folder)
    if lock is not None:
        lock.take(folder)
    for function in user_functions(recipe):
        print(f"the run imports user code: {function.where()}", flush=True)
    return before


def make_parts(
    recipe: Recipe, world: World, rule: BaseRule, timeline: Timeline | None, source: Path | None
) -> tuple[FeedFacts, Trainer, ConvolutionPlan, list[str]]:
    """Return the feed, the trainer and the convolution timings of a run, and lines to report. `source` is the folder of
    the run that is resumed or replayed. With `convolutions = "autotune"` a warm-up step on a processor completes the
    timings. Raises RecipeError where the network does not take the data."""
    share, lines = bind_cores(world, threads_of(recipe))
    device, virtual = take_device(recipe.compute.device, world), recipe.training.virtual_ranks
    check_ranks(world, recipe)
    lines += [*describe_precision(recipe, world, device), *describe_unused(recipe.rule)]
    lines += [*describe_unused_data(recipe.data), *describe_wire(recipe, world.nodes)]
    feed = make_feed(recipe, world, share, rule, None if timeline is None else timeline.add, device)
    layers = plan_of(recipe, world.size)
    if recipe.parallel.layers == AUTO:
        choice = choose_layers(recipe, world, feed, rule, device)
        layers, lines = choice.plan, lines + choice.lines
    lines += feed.notes
    plan = load_plan(recipe.compute.plan, None if source is None else source / run_directory.CONVOLUTIONS, world)
    model, options, within = make_model(recipe, feed, device), recipe.optimizer, context_of(recipe, device)
    if layers is not None:
        split_model(model, world, layers)
    if recipe.compute.convolutions == "autotune" and device.type == HOST:
        prepare(model, plan)
        shares = virtual or (rule.seats(world.size).workers if has_servers(rule) else world.size)
        first, last = bounds(recipe.training.batch, shares, 0 if virtual else min(world.rank, shares - 1))
        warm_up(model, cast_inputs(feed.blank(last - first), DTYPES[recipe.model.dtype]), plan, world, within)
    numbers = options.learning_rate, options.momentum, options.weight_decay
    optimizer = make_optimizer(options.name, model, *numbers, options.nesterov, options.betas)
    trainer = Trainer(
        model,
        world,
        rule,
        optimizer,
        clip=options.clip or None,
        timeline=timeline,
        within=within,
        virtual_ranks=virtual,
        threads=threads_of(recipe) or 1,
    )
    split = split_of(model)
    if recipe.parallel.layers != AUTO and split is not None and split.plan.splits:
        lines += [f"layers split: {split.plan}", describe_borders(split.plan.splits)]
    check_state(model, optimizer)
    return feed, trainer, plan, lines


def bind_cores(world: World, threads: int = 0) -> tuple[CoreShare, list[str]]:
    """Bind this rank to its share of its node's cores, and compute with `threads`, or those of its cores. Return the
    share, and one report line for each kind of node."""
    node = world.node_world()
    shares = shares_of(node.all_gather_object(available_cores()), alone=world.size == 1)
    share = shares[node.rank]
    bind(share)
    if threads:
        torch.set_num_threads(threads)
    elif share.bound:  # OMP_NUM_THREADS may be meant for all ranks together
        torch.set_num_threads(min(torch.get_num_threads(), len(share.cores)))
    return share, list(dict.fromkeys(world.all_gather_object(report(shares))))


def take_device(name: str, world: World) -> torch.device:
    """Return the device of this rank by its name in a recipe, and make it PyTorch's current one. Collective.

    Raises UsageError on all ranks where one has none.
    """
    device = device_of_rank(name, world)
    if device.type != HOST:
        module_of(device).set_device(device)
    return device


def product_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """Return the dtype in which convolutions and wide layers are computed on this processor, or another device."""
    return choose_dtype(recipe.compute.precision, DTYPES[recipe.model.dtype], device)


def describe_precision(recipe: Recipe, world: World, device: torch.device) -> list[str]:
    """Return lines about number format and devices for the start of a run, one for each kind of node. Collective."""
    products = f"products in {str(product_dtype(recipe, device)).removeprefix('torch.')}"
    if device.type == HOST:
        counts = sorted(set(world.all_gather_object(torch.get_num_threads())))
        threads = f"{' or '.join(map(str, counts))} thread{'s' * (counts != [1])}"
        lines = [f"{products}, {threads} a rank, {processor().name}"]
        if (unused := torch.accelerator.current_accelerator(check_available=True)) is not None:
            lines.append(f'{unused.type} ({_model_of(unused)}) is not used: compute.device = "auto" takes it')
        return lines
    devices = world.node_world().all_gather_object(f"{device}")
    on = ", ".join(f"rank {rank} on {name}" for rank, name in enumerate(devices))
    untuned = "; convolutions are not autotuned there" if recipe.compute.convolutions == "autotune" else ""
    sums = f"; {world.device_transports(device)}" if world.size > 1 else ""
    return list(dict.fromkeys(world.all_gather_object(f"{products}, {on} ({_model_of(device)}){sums}{untuned}")))


def _model_of(device: torch.device) -> str:
    return str(getattr(module_of(device), "get_device_name", lambda _: device.type)(device))


def make_feed(
    recipe: Recipe, world: World, share: CoreShare, rule: BaseRule, observe: Observe | None, device: torch.device
) -> FeedFacts:
    """Return the feed of the recipe's data set; for a rank that only serves, its facts. Called by all ranks together.

    Workers of an asynchronous rule draw and test by themselves. `observe` is called with the spans of the feed's work.
    Batches are to be copied to `device`.
    """
    if not has_servers(rule):
        return _feed(recipe, world, share, False, observe, device)
    trains = world.rank < rule.seats(world.size).workers
    group = world.split(0 if trains else 1)
    feed = _feed(recipe, group, share, True, observe, device) if trains else None
    facts = world.call_on_root(lambda: None if feed is None else feed.facts)
    assert facts is not None, "rank 0 is a worker"
    return facts if feed is None else feed


def _feed(
    recipe: Recipe, world: World, share: CoreShare, out_of_step: bool, observe: Observe | None, device: torch.device
) -> Feed:
    data, seed = recipe.data, recipe.training.seed
    if data.pack:
        data = replace(data, threads=decoding_threads(data, share))
        feed = packed_feed(data, world, seed, out_of_step=out_of_step, device=device, observe=observe)
    else:
        feed = in_memory_feed(BUILTIN_DATASETS[data.name](), world, seed, observe, data.shuffle)
    feed.share_among(recipe.training.virtual_ranks)
    return feed


def decoding_threads(data: DataOptions, share: CoreShare) -> int:
    return data.threads or min(MAX_DECODING_THREADS, max(1, len(share.cores) if share.bound else share.threads))


def make_model(recipe: Recipe, facts: InputFacts, device: torch.device) -> torch.nn.Module:
    """Return the recipe's network on a device, with weights from the seed, which are the same on all devices. Raises
    RecipeError where it does not take the data."""
    torch.manual_seed(recipe.training.seed)
    network = make_network(recipe.model.name, recipe.model.folder, facts.classes, facts.channels)
    model = network.to(device, DTYPES[recipe.model.dtype])
    blank = cast_inputs(facts.blank(1).to(device), DTYPES[recipe.model.dtype])
    check_fit(model, recipe.model.name, blank, facts.classes, context_of(recipe, device))
    return model


def context_of(recipe: Recipe, device: torch.device) -> StepContext:
    """Return the function that gives the context in which the network computes: autocast to its number format."""
    return partial(autocast_to, product_dtype(recipe, device), DTYPES[recipe.model.dtype], device.type)


def check_fit(model: torch.nn.Module, name: str, inputs: Tensor, classes: int, within: StepContext) -> None:
    """Raise RecipeError where a network has another number of scores than of classes, of texts fewer than of tokens, or
    one of the catalogue does not take the data; a user's network may need more samples than one, or others."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), within():
            scores = model.eval()(inputs)
    except MODEL_ERRORS as error:
        if ":" in name:
            return
        shape = " x ".join(map(str, inputs.shape[1:]))
        raise RecipeError(
            f"model.name = {name!r} does not take samples of {shape}, as the data has them ({error}); "
            "see docs/training.md for what each network takes"
        ) from error
    finally:
        for module, mode in modes:  # a frozen part stays in evaluation mode
            module.training = mode
    if not isinstance(scores, Tensor):
        raise RecipeError(f"model.name = {name!r} returns a {type(scores).__name__} in evaluation, not scores")
    each = scores.dim() == 2 and len(scores) == 1  # of more rows, each has a token's
    if scores.shape[-1] < classes or (each and scores.shape[-1] > classes):
        raise RecipeError(f"model.name = {name!r} has {scores.shape[-1]} scores, but the data have {classes} classes")


def choose_layers(recipe: Recipe, world: World, feed: InputFacts, rule: BaseRule, device: torch.device) -> PlanChoice:
    """Return the plan of the layers for `feed`'s shapes of inputs, and lines about it. All ranks call it together."""
    model = make_model(recipe, feed, device).train()
    first, last = bounds(recipe.training.batch, world.size, world.rank)
    example = cast_inputs(feed.blank(last - first).to(device), DTYPES[recipe.model.dtype])
    return choose_plan(model, world, example, context_of(recipe, device), deferred=True, refused=refusal(rule))
