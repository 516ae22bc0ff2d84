"""Builds the parts of a recipe on the ranks of a world: cores, the feed, the network, its trainer.

cores, device ─ feed ─ (layers to split) ─ network ─ a warm-up step, with autotuned convolutions ─ trainer

The warm-up step times the algorithms of each convolution; the ranks take the best:

    rank 0   forward, backward on zeros: each algorithm timed ┐
    rank 1   forward, backward on zeros: each algorithm timed ┴ the slowest rank's time of each ─ the best, on all ranks

The ranks time them at the same time, since the time of an algorithm depends on how much memory the others read.
The step leaves no trace: gradients, the buffers of norms, and the memory of algorithms not chosen are reset. On an
accelerator there is none: its convolutions are those of PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.binding import CoreShare, bind, report, shares_of
from unisono.compute.convolution_plan import ConvolutionPlan, Times, check_plan, machine, merge, read_plan, write_plan
from unisono.compute.prepare import StepContext, autocast_to, choose_dtype, prepare, release_free_memory
from unisono.data.builtin import BUILTIN_DATASETS, in_memory_feed
from unisono.data.feed import Feed, FeedFacts
from unisono.data.loading import InputFacts, cast_inputs, device_of_rank
from unisono.data.options import DataOptions
from unisono.data.pack.layout import check_installed
from unisono.device import module_of
from unisono.engine import Observe
from unisono.errors import RecipeError
from unisono.files import naming_os_errors
from unisono.launch import available_cores
from unisono.models import make_network
from unisono.optimizers import make_optimizer
from unisono.plan.layer_plan import ParallelPlan
from unisono.plan.planned_run import MAX_DECODING_THREADS
from unisono.processor import HOST, processor
from unisono.rules import BaseRule
from unisono.rules.asynchronous import has_servers
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.choose_plan import PlanChoice, choose_plan
from unisono.tensor_parallel.model import refusal, split_model
from unisono.training.accuracy import blank_labels, classification_loss
from unisono.training.recipe import Recipe, threads_of
from unisono.training.timeline import Timeline
from unisono.training.trainer import Trainer
from unisono.world import World

DTYPES = {"float32": torch.float32, "float64": torch.float64}


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
    return choose_dtype(recipe.compute.precision, DTYPES[recipe.model.dtype], device, processor())


def describe_precision(recipe: Recipe, world: World, device: torch.device) -> list[str]:
    """Return lines about number format and devices for the start of a run, one for each kind of node. Collective."""
    products = f"products in {str(product_dtype(recipe, device)).removeprefix('torch.')}"
    if device.type == HOST:
        counts = sorted(set(world.all_gather_object(torch.get_num_threads())))
        threads = " or ".join(map(str, counts))
        return [f"{products}, {threads} thread{'s' * (counts != [1])} a rank, {processor().name}", *_unused()]
    devices = world.node_world().all_gather_object(f"{device}")
    on = ", ".join(f"rank {rank} on {one}" for rank, one in enumerate(devices))
    own = "; convolutions are not autotuned there" if recipe.compute.convolutions == "autotune" else ""
    sums = f"; {world.device_transports(device)}" if world.size > 1 else ""
    return list(dict.fromkeys(world.all_gather_object(f"{products}, {on} ({_model_of(device)}){sums}{own}")))


def _unused() -> list[str]:
    """Return a line about accelerators that nobody has asked for."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    return [f'{found.type} ({_model_of(found)}) is not used: compute.device = "auto" takes it']


def _model_of(device: torch.device) -> str:
    """Return the name of an accelerator's model."""
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
        check_installed()
        from unisono.data.packed_feed import packed_feed  # noqa: PLC0415  what only packs need

        data = replace(data, threads=decoding_threads(data, share))
        feed = packed_feed(data, world, seed, out_of_step=out_of_step, device=device, observe=observe)
    else:
        feed = in_memory_feed(BUILTIN_DATASETS[data.name](), world, seed, observe, data.shuffle)
    feed.share_among(recipe.training.virtual_ranks)
    return feed


def decoding_threads(data: DataOptions, share: CoreShare) -> int:
    """Return the number of threads that decode samples in a rank with this share of its node's cores."""
    return data.threads or min(MAX_DECODING_THREADS, max(1, len(share.cores) if share.bound else share.threads))


def make_model(recipe: Recipe, facts: InputFacts, device: torch.device) -> torch.nn.Module:
    """Return the recipe's network on a device, with weights from the seed, which are the same on all devices.

    Raises RecipeError where it does not take the data.
    """
    torch.manual_seed(recipe.training.seed)
    network = make_network(recipe.model.name, recipe.model.folder, facts.classes, facts.channels)
    model = network.to(device, DTYPES[recipe.model.dtype])
    blank = cast_inputs(facts.blank(1).to(device), DTYPES[recipe.model.dtype])
    check_fit(model, recipe.model.name, blank, context_of(recipe, device))
    return model


def context_of(recipe: Recipe, device: torch.device) -> StepContext:
    """Return the function that gives the context in which the network computes: autocast to its number format."""
    return partial(autocast_to, product_dtype(recipe, device), DTYPES[recipe.model.dtype], device.type)


def make_trainer(
    recipe: Recipe,
    world: World,
    feed: InputFacts,
    rule: BaseRule,
    layers: ParallelPlan | None,
    timeline: Timeline | None,
    plan: ConvolutionPlan,
    device: torch.device,
) -> Trainer:
    """Return the trainer of the recipe's network on a device by a rule, split by the plan `layers`.

    With `convolutions = "autotune"` a warm-up step on a processor completes `plan`. Raises RecipeError where the
    network does not take the data.
    """
    model, options, within = make_model(recipe, feed, device), recipe.optimizer, context_of(recipe, device)
    dtype = DTYPES[recipe.model.dtype]
    if layers is not None:
        split_model(model, world, layers)
    if recipe.compute.convolutions == "autotune" and device.type == HOST:
        prepare(model, plan)
        virtual = recipe.training.virtual_ranks
        first, last = bounds(recipe.training.batch, virtual or world.size, 0 if virtual else world.rank)
        warm_up(model, cast_inputs(feed.blank(last - first), dtype), plan, world, within)
    numbers = options.learning_rate, options.momentum, options.weight_decay
    optimizer = make_optimizer(options.name, model, *numbers, options.nesterov, options.betas)
    shares = recipe.training.virtual_ranks, threads_of(recipe) or 1
    return Trainer(model, world, rule, optimizer, classification_loss, options.clip or None, timeline, within, *shares)


def check_fit(model: torch.nn.Module, name: str, inputs: Tensor, within: StepContext) -> None:
    """Raise RecipeError where a catalogue network does not take the data; a user's network raises its own errors."""
    if ":" in name:
        return
    try:
        with torch.no_grad(), within():
            model.eval()(inputs)
    except (RuntimeError, ValueError) as error:
        shape = " x ".join(map(str, inputs.shape[1:]))
        raise RecipeError(
            f"model.name = {name!r} does not take samples of {shape}, as the data has them ({error}); "
            "see docs/training.md for what each network takes"
        ) from error


def load_plan(recipe: Recipe, own: Path | None, world: World) -> ConvolutionPlan:
    """Return a plan with the convolution timings known so far; missing ones are measured later.

    A resumed run uses only its `own` file if that has timings, so that it computes as it began; otherwise the recipe's
    file is read. Raises UsageError where the recipe's file could not be written.
    """

    def read() -> dict[str, Times]:
        here = machine(processor().name)
        before = {} if own is None else read_plan(own, here)
        if not recipe.compute.plan:
            return before
        check_plan(Path(recipe.compute.plan))
        return before or read_plan(Path(recipe.compute.plan), here)

    return ConvolutionPlan(world.call_on_root(read))


def save_plan(recipe: Recipe, own: Path, plan: ConvolutionPlan, world: World) -> None:
    """Write the measured timings into the run's folder, and add them to the recipe's file."""

    def write() -> None:
        here = machine(processor().name)
        for path in (own, *([Path(recipe.compute.plan)] if recipe.compute.plan else [])):
            with naming_os_errors(f"cannot write {path}"):
                write_plan(path, here, plan.measured)

    if plan.measured:
        world.call_on_root(write)


def choose_layers(recipe: Recipe, world: World, feed: InputFacts, rule: BaseRule, device: torch.device) -> PlanChoice:
    """Return the plan of the layers, the same on all ranks, which call this together, and lines about it.

    `feed` gives the shapes of the network's inputs; nothing is read from it.
    """
    model = make_model(recipe, feed, device).train()
    first, last = bounds(recipe.training.batch, world.size, world.rank)
    example = cast_inputs(feed.blank(last - first).to(device), DTYPES[recipe.model.dtype])
    whole = refusal(rule, recipe.optimizer.name)
    return choose_plan(model, world, example, context_of(recipe, device), deferred=True, whole=whole)


def warm_up(model: nn.Module, inputs: Tensor, plan: ConvolutionPlan, world: World, within: StepContext) -> None:
    """Settle `plan` on all ranks of `world` by a step of `model`, of which nothing stays, on this rank's inputs.

    All ranks call it together.
    """
    if len(inputs):
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        if not model.training:
            model.train()
        with within():
            scores = model(inputs)
            loss = classification_loss(scores, blank_labels(scores))
        loss.backward()  # type: ignore[no-untyped-call]
        for buffer, before in buffers:
            buffer.copy_(before)
        model.zero_grad(set_to_none=True)
        release_free_memory()
    plan.freeze(merge(world.all_gather_object(plan.measured)))
