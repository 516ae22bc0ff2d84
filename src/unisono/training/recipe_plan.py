"""Run to be planned, from a recipe: its network is traced, its data are looked at, its layers may be split.

recipe, changes ─▶ PlanRecipe ┬ network ─ trace ─▶ layers ┬─▶ PlannedRun ─▶ rows        plan/run_plan.py
machine, nodes ───────────────┴ data, or its [samples] ───┘

recipe ┬ data.name ─▶ data set that comes with Unisono: already decoded
       └ data.pack ─▶ index: samples, bytes, classes, shape ─▶ headers of the first images: pixels
                      not on this machine: the shape of images of data.size, and of CD-DNN's windows

A plan's recipe has a table more, for what a data set that is not on this machine does not tell: [samples]. Changes that
are asked for as "what if" are keys of that recipe, or values of the machine (`plan/machines.py`); several with commas
are made together: "bandwidth=2x,exchange.wire=bfloat16".
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unisono.data.builtin import BUILTIN_DATASETS
from unisono.data.kinds import IMAGE, make_transform
from unisono.data.kinds.audio import BANDS
from unisono.data.options import DataOptions
from unisono.data.pack import TEST_SPLITS, TRAIN_SPLITS, check_installed, split_folder
from unisono.data.storage import AUTO as STORAGE_AUTO
from unisono.data.storage import FILES, PARTITIONED, REPLICATED, STREAMED
from unisono.errors import RecipeError, UsageError
from unisono.formats import counted
from unisono.models import MODELS, check_name, input_shape, make_network
from unisono.optimizers import OPTIMIZERS
from unisono.optimizers.layerwise import LayerwiseOptimizer
from unisono.placement import Placement
from unisono.plan.layer_plan import AUTO
from unisono.plan.loading import MAX_DECODING_THREADS, SampleFacts
from unisono.plan.machines import FLOAT32, MachineFacts, changed_machine
from unisono.plan.planned_run import PlannedRun, at_rate_of, numbers_kept
from unisono.plan.trace import MODEL_ERRORS, Trace, reason_of, trace
from unisono.processor import HOST
from unisono.tables import number
from unisono.tensor_parallel.choose_plan import split_model_of
from unisono.training.recipe import (
    AuditRecipe,
    ModelRecipe,
    Recipe,
    find_recipe,
    parse_recipe,
    read_as,
    threads_of,
    to_dict,
)
from unisono.training.recipe_check import about_virtual_ranks, describe_wire, make_rule
from unisono.user_function import is_user_function

if TYPE_CHECKING:
    from unisono.data.pack.index import Index

TRACED_SAMPLES = 2
"""Samples of a trace: batch norm needs more than one."""

CLASSES = 1000
"""Classes of a network where neither [samples] nor the data give them: those of ImageNet."""

MAX_SAMPLE_NUMBERS = 10**9
"""Largest number of numbers in a sample."""

MAX_HEADERS_READ = 64
"""Number of images whose headers are read for the mean number of pixels."""


@dataclass(frozen=True)
class SampleRecipe:
    """Samples of a planned run, before what its data tell; empty or 0: as the data tell, or not known."""

    shape: str = field(default="", metadata={"or_number": True})
    """Shape of a sample, as in "3x224x224" or 440; without it and without data that of the network's paper."""
    classes: int = number(0, at_least=0)
    train: int = number(0, at_least=0)
    """Training samples of an epoch."""
    test: int = number(0, at_least=0)
    """Samples of the test after each epoch."""
    bytes: int = number(0, at_least=0)
    """Bytes of an encoded sample."""
    pixels: int = number(0, at_least=0)
    """Pixels that are decoded of a sample."""


@dataclass(frozen=True)
class PlanRecipe(Recipe):
    """Recipe of a planned run."""

    samples: SampleRecipe = field(default_factory=SampleRecipe)


def plan_recipe(path: Path | None, model: str | None, changes: Sequence[str] = ()) -> PlanRecipe:
    """Return the recipe in a file, or that of a network without data, with `changes` of the form key=value.

    Raises UsageError unless one of both is given, and RecipeError as `read_recipe`.
    """
    if (model is None) == (path is None):
        raise UsageError("give a recipe or --model NAME, one of them: unisono plan digits --machine NAME")
    if path is not None:
        return read_as(PlanRecipe, find_recipe(path), changes)
    return parse_recipe(PlanRecipe, {"model": {"name": model}, "data": {"name": ""}}, "--model", changes)


def what_if(recipe: PlanRecipe, machine: MachineFacts, changes: str) -> tuple[PlanRecipe, MachineFacts]:
    """Return recipe and machine after changes such as "bandwidth=2x,exchange.wire=bfloat16". Raises UsageError for a
    text that is no change, and for a value that the machine does not have."""
    for change in changes.split(","):
        if "." in change.partition("=")[0]:
            recipe = parse_recipe(PlanRecipe, to_dict(recipe), "--what-if", [change])
        else:
            machine = changed_machine(machine, change)
    return recipe, machine


def planned_run(recipe: PlanRecipe, machine: MachineFacts, nodes: int, ranks_per_node: int = 1) -> PlannedRun:
    """Return the run of a recipe on nodes of a machine, at the machine's rate of the network where it has one.

    Raises UsageError for a network that cannot be traced, or whose samples are not known, a rule that is unknown,
    splits that no rule takes, virtual ranks, an audit or a batch that do not fit, for accelerators that the machine
    does not have, and for rates of an unknown network; "auto" is planned on what it has.
    """
    for complaint in about_virtual_ranks(recipe, nodes * ranks_per_node):
        raise RecipeError(complaint)
    if recipe.compute.device not in (HOST, AUTO) and not machine.node.accelerators:
        raise UsageError(
            f"compute.device = {recipe.compute.device!r}, but {machine.name} has no accelerators: plan with "
            f"--set compute.device={HOST}"
        )
    for row in machine.networks:
        if row.name not in MODELS and not is_user_function(row.name):
            near = get_close_matches(row.name, MODELS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MODELS)}"
            raise UsageError(f"{machine.name} has a [[network]] named {row.name!r}, which is none; {hint}")
    data, samples, training, model = recipe.data, known_samples(recipe), recipe.training, recipe.model
    if 0 < samples.train < training.batch:
        given = data.pack or data.name or "samples.train"
        raise RecipeError(f"training.batch = {training.batch}, but {given} has {samples.train} samples to train on")
    own = is_user_function(model.name)
    if own and not (samples.shape or data.size):
        raise UsageError(
            f"model.name = {model.name!r} is a network of your own, whose samples no paper tells: give their shape and "
            "classes, as in --set samples.shape=3x32x32 --set samples.classes=10"
        )
    shape = sample_shape(samples.shape) or input_shape(model.name, data.size)
    dtype = getattr(torch, model.dtype)
    network, traced = traced_network(model.name, model.folder, shape, samples.classes or CLASSES, dtype)
    rule, optimizer = make_rule(recipe), recipe.optimizer
    measured = model.name if shape == input_shape(model.name) else ""
    rates = machine.in_precision(recipe.compute.precision if model.dtype == FLOAT32 else FLOAT32)
    rates = at_rate_of(rates, measured, traced.layers, TRACED_SAMPLES, training.batch / nodes)
    speed, notes = speed_of_threads(recipe, machine, ranks_per_node)
    notes += tuple(describe_wire(recipe, nodes))
    if data.pack and not samples.shape:
        why = "by data.size" if data.size else "the network's own"
        notes += (f"samples of {_words(shape)}, {why}: {data.pack} is not here; else --set samples.shape",)
    if own and not samples.classes:
        notes += (f"assumed, samples.classes: {CLASSES:,}, those of ImageNet; else --set samples.classes=N",)
    if data.storage == STORAGE_AUTO:
        notes += (f"samples: planned as {PARTITIONED}, a share in each rank; a run chooses by its memory",)
    return PlannedRun(
        replace(rates.at_speed(speed), networks=rates.networks),  # the row is shown as the file has it
        traced.layers,
        TRACED_SAMPLES,
        rule,
        training.batch,
        nodes,
        ranks_per_node,
        recipe.rule.name,
        numbers_kept(optimizer.name, optimizer.momentum),
        optimizer.clip or None,
        issubclass(OPTIMIZERS.load(optimizer.name), LayerwiseOptimizer),
        sample_facts(data, samples),
        samples.train or None,
        samples.test,
        training.epochs,
        training.checkpoint_every,
        training.checkpoint_minutes,
        recipe.compute.convolutions == "autotune",
        split_model_of(recipe.parallel.layers, recipe.parallel.ranks, rule, network, traced),
        training.virtual_ranks,
        notes,
    )


def sample_facts(data: DataOptions, samples: SampleRecipe) -> SampleFacts:
    """Return the samples as these options store and load them."""
    copies, threads = 0 if data.storage in (REPLICATED, FILES) else data.groups, data.threads or MAX_DECODING_THREADS
    facts = SampleFacts(samples.bytes, samples.pixels, threads, data.storage in (STREAMED, FILES), copies)
    if data.storage != STREAMED:
        return facts
    stored = samples.train * samples.bytes
    return facts._replace(cached=min(1.0, data.cache / stored) if stored else 0.0, buffers=2 * data.buffer)


def speed_of_threads(recipe: Recipe, machine: MachineFacts, ranks_per_node: int) -> tuple[float, tuple[str, ...]]:
    """Return the share of a node's speed that the threads of its ranks have, and lines on it and on what a recipe asks
    for that no number of a plan counts."""
    threads, cores, notes = threads_of(recipe), machine.node.cores, list[str]()
    threads = 0 if machine.node.accelerators else threads
    speed = min(1.0, threads * ranks_per_node / cores) if threads and cores else 1.0
    if machine.node.accelerators and recipe.compute.device == HOST:
        notes.append("computing: on the accelerators, which a run takes with --set compute.device=auto")
    if speed < 1:
        notes.append(f"computing: {ranks_per_node} x {threads} of {cores} cores of a node, {speed:.0%} of its speed")
    if threads and not cores:
        notes.append(f"not in these numbers: ranks of {threads} threads, for the machine file has no node.cores")
    if recipe.model.dtype != ModelRecipe.dtype:
        notes.append(
            f"not in these numbers: products in {recipe.model.dtype}, about half as fast, and fewer bits of wires"
        )
    if recipe.audit != AuditRecipe():
        again = f", {recipe.audit.fraction:.0%} of computing again" if recipe.audit.fraction else ""
        notes.append(f"not in these numbers: hashes of [audit]{again}")
    return speed, tuple(notes)


def run_on_ranks(recipe: Recipe, samples: SampleRecipe, machine: MachineFacts, placement: Placement) -> PlannedRun:
    """Return the run of a recipe on ranks on nodes of a machine. Raises UsageError for layers that
    are split and for an uneven spread, which a machine file does not predict, and as `planned_run` does."""
    if recipe.parallel.layers:
        raise UsageError("its layers are split over ranks, which a machine file does not predict")
    nodes, of_nodes = len(placement.nodes), {len(ranks) for ranks in placement.nodes}
    if len(of_nodes) > 1:
        raise UsageError(f"{placement.ranks} ranks do not spread evenly over {nodes} nodes")
    if min(of_nodes) < machine.node.accelerators:
        ranks, there = counted(min(of_nodes), "rank"), machine.node.accelerators
        raise UsageError(f"{ranks} on a node, an accelerator each, and a node of {machine.name} has {there}")
    return planned_run(PlanRecipe(**vars(recipe), samples=samples), machine, nodes, *of_nodes)


def known_samples(recipe: PlanRecipe) -> SampleRecipe:
    """Return the samples of a recipe as they are given, and else as its data tell, if these are on this machine. Raises
    RecipeError for an unknown data set, and PackError for a pack that cannot be read, or not with its options."""
    data, samples = recipe.data, samples_of(recipe.data)
    if data.pack and not samples.shape and recipe.model.name == "cd_dnn":  # elsewhere; of recordings, as audio.py has
        samples = replace(samples, shape=f"{data.windows}x{BANDS * (2 * data.context + 1)}")
    return replace(samples, **{key: value for key, value in vars(recipe.samples).items() if value})


def samples_of(recipe: DataOptions) -> SampleRecipe:
    """Return what data tell: nothing without a name, or of a pack that is not here."""
    if not recipe.pack:
        if not recipe.name:
            return SampleRecipe()
        if recipe.name not in BUILTIN_DATASETS:
            raise RecipeError(f"data.name = {recipe.name!r}; there are {', '.join(BUILTIN_DATASETS)}")
        data = BUILTIN_DATASETS[recipe.name]()
        return SampleRecipe(_words(data.train.inputs.shape[1:]), data.classes, len(data.train), len(data.test))
    folder = Path(recipe.pack)
    if not folder.is_dir():
        return SampleRecipe()
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  Arrow takes a while, and only packs need it

    train, test = (read_index(split_folder(folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS))
    transform, sizes = make_transform(train, recipe)(), (round(train.nbytes / len(train)), round(mean_pixels(train)))
    blank = transform.batch(torch.empty(1, *transform.shape, device="meta"))
    return SampleRecipe(_words(blank.shape[1:]), len(train.about.classes), len(train), len(test), *sizes)


def _words(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def mean_pixels(index: Index) -> float:
    """Return the pixels of an image in a pack, the mean of its first ones; 0 for raw samples and recordings."""
    if index.about.kind != IMAGE:
        return 0.0
    from PIL import Image  # noqa: PLC0415  only packs of images need it

    from unisono.data.pack.stripe import read_stretch  # noqa: PLC0415  Arrow takes a while

    pixels = list[int]()
    for stretch in read_stretch(index, 0, min(MAX_HEADERS_READ, len(index))):
        for first, last in zip(stretch.offsets[:-1], stretch.offsets[1:], strict=True):
            with Image.open(io.BytesIO(stretch.data[first:last].tobytes())) as image:
                pixels.append(image.width * image.height)
    return sum(pixels) / len(pixels)


@lru_cache(1)
def traced_network(
    name: str, folder: str, shape: tuple[int, ...], classes: int, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Trace]:
    """Return the network for samples of this shape, of this dtype, without memory for weights, and its trace. Raises
    RecipeError for an unknown network, and UsageError, naming the layer, for one that cannot be traced."""
    check_name(name, folder)
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                channels = shape[0] if len(shape) > 2 else shape[-1]  # of an image; else numbers of a window
                network = make_network(name, folder, classes, channels).to(dtype)
        except MODEL_ERRORS as error:  # of a user's network: weights on meta have no values
            why = f"is not made without memory for its weights: {reason_of(error)}"
            raise UsageError(f"model.name = {name!r} {why}") from error
        try:
            return network, trace(network, example_of(network, shape, TRACED_SAMPLES))
        except UsageError as error:
            if len(shape) != 2:
                raise
            why = f"samples.shape of an image is channels x height x width, not {_words(shape)}"
            raise UsageError(f"{why}: {error}") from error


def example_of(network: nn.Module, shape: tuple[int, ...], samples: int) -> Tensor:
    """Return inputs of this shape, (samples, *shape), without memory: tokens where the first layer is an embedding."""
    first = next((module for module in network.modules() if not any(module.children())), None)
    weights_dtype = next((parameter.dtype for parameter in network.parameters()), torch.get_default_dtype())
    dtype = torch.int64 if isinstance(first, nn.Embedding) else weights_dtype
    return torch.empty(samples, *shape, dtype=dtype, device="meta")


def sample_shape(text: str) -> tuple[int, ...]:
    """Return the shape in a text such as 3x224x224, () in an empty one. Raises UsageError for any other text."""
    sizes = text.split("x") if text else []
    if not all(size.isdecimal() and len(size) < 12 and int(size) for size in sizes):
        raise UsageError(f"samples.shape = {text!r}; give the shape of a sample, as in 3x224x224")
    shape = tuple(map(int, sizes))
    if prod(shape) > MAX_SAMPLE_NUMBERS:
        raise UsageError(f"samples.shape = {text!r} has {prod(shape):,} numbers: the limit is {MAX_SAMPLE_NUMBERS:,}")
    return shape
