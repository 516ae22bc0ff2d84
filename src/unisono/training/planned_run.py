"""Run to be planned: the network, batch, optimizer, rule and data of a recipe, or those of a command line.

recipe ─┐
options ─┴─▶ PlannedRun ─▶ layers, settings ─▶ plan/run_plan.py         an option goes before the recipe

recipe ┬ data.name ─▶ data set that comes with Unisono: already decoded
       └ data.pack ─▶ index: samples, bytes, classes ─▶ headers of the first images: pixels
                      not on this machine: nothing is known

"What if" changes it, its machine, its wire or its rule; several with commas are made together:

    bandwidth=2x             the machine      plan/what_if.py
    wire=bfloat16            number format between nodes, of all rules
    rule=local_sgd:16        the rule, in place of all, with the same exchange
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from unisono.data.builtin import BUILTIN_DATASETS
from unisono.data.kinds import IMAGE, find_kind
from unisono.data.requirements import check_installed
from unisono.data.splits import TEST_SPLITS, TRAIN_SPLITS, split_folder
from unisono.data.storage import STREAMED
from unisono.errors import RecipeError, UsageError
from unisono.models.registry import make_network
from unisono.models.user_network import check_name
from unisono.plan.loading import MAX_DECODING_THREADS, SampleFacts
from unisono.plan.machines import MachineFacts
from unisono.plan.rank_memory import numbers_kept
from unisono.plan.run_settings import RunSettings
from unisono.plan.wall_time import Job
from unisono.plan.what_if import changed_machine
from unisono.rules import BSP, BaseRule, Exchange
from unisono.training.named_rule import exchange_of, named_rule
from unisono.training.recipe import DataRecipe, ParallelRecipe, Recipe, RuleRecipe
from unisono.training.recipe_file import find_recipe, read_recipe
from unisono.wires import WIRES

if TYPE_CHECKING:
    from unisono.data.pack.index import Index


TRACED_SAMPLES = 2
"""Samples of a trace: batch norm needs more than one."""

LAYER_NORMS = ("lars", "lamb")
"""Optimizers whose step needs norms of whole layers."""

CLASSES = 1000
"""Classes of a network where neither an option nor the data give them: those of ImageNet."""


MAX_HEADERS_READ = 64
"""Number of images whose headers are read for the mean number of pixels."""


class PlannedData(NamedTuple):
    """Data of a run, as far as they are known before it starts."""

    samples: SampleFacts = SampleFacts()
    train: int | None = None
    """Number of training samples; None: not known."""
    test: int = 0
    classes: int | None = None
    shape: tuple[int, ...] | None = None
    """Shape of a sample of text, (tokens,); None: given by the network or by an option."""


def data_of(recipe: DataRecipe) -> PlannedData:
    """Return the data of a recipe; of a pack that is not on this machine, its form in memory alone.

    Raises RecipeError for an unknown data set, and PackError for a pack that cannot be read.
    """
    facts = SampleFacts(
        threads=recipe.threads or MAX_DECODING_THREADS,
        from_disk=recipe.storage == STREAMED,
        copies=0 if recipe.storage == "replicated" else recipe.groups,
    )
    if not recipe.pack:
        if recipe.name not in BUILTIN_DATASETS:
            raise RecipeError(f"data.name = {recipe.name!r}; there are {', '.join(BUILTIN_DATASETS)}")
        data = BUILTIN_DATASETS[recipe.name]()
        return PlannedData(facts, len(data.train), len(data.test), data.classes)
    folder = Path(recipe.pack)
    if not folder.is_dir():
        return PlannedData(facts)
    check_installed()
    from unisono.data.pack.index import read_index  # noqa: PLC0415  Arrow takes a while, and only packs need it

    train, test = (read_index(split_folder(folder, names)) for names in (TRAIN_SPLITS, TEST_SPLITS))
    facts = facts._replace(nbytes=train.nbytes / len(train), pixels=mean_pixels(train))
    labels = find_kind(train.about.kind).labels_per_sample(train.about.shape)
    return PlannedData(facts, len(train), len(test), len(train.about.classes), (labels,) if labels > 1 else None)


def mean_pixels(index: Index) -> float:
    """Return the pixels of an image in a pack, the mean of its first ones; 0 for raw samples and recordings."""
    if index.about.kind != IMAGE:
        return 0.0
    from PIL import Image  # noqa: PLC0415  only packs of images need it

    from unisono.data.pack.stripe import read_stretch  # noqa: PLC0415  Arrow takes a while

    found = list[int]()
    for stretch in read_stretch(index, 0, min(MAX_HEADERS_READ, len(index))):
        for first, last in zip(stretch.offsets[:-1], stretch.offsets[1:], strict=True):
            with Image.open(io.BytesIO(stretch.data[first:last].tobytes())) as image:
                found.append(image.width * image.height)
    return sum(found) / len(found)


@dataclass(frozen=True)
class PlannedRun:
    """Run without its machine and its numbers of nodes."""

    name: str
    """Name of the network."""
    minibatch: int
    rules: Mapping[str, BaseRule]
    folder: str = ""
    """Folder of a network of your own."""
    optimizer: str = "sgd"
    momentum: float = 0.9
    clip: float | None = None
    size: int = 0
    """Width and height of input images in pixels; 0: as in the network's paper."""
    data: PlannedData = field(default_factory=PlannedData)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    """Layers that are split; empty: none are, and a plan says where that would be faster."""
    job: Job = field(default_factory=Job)
    slow_nodes: Mapping[int, float] = field(default_factory=dict)
    """Times that a node computes as long as others, by its number."""
    simulated: bool = False
    """True where exchanges between nodes have their simulated seconds."""


def planned_run(recipe: Path | None, model: str | None, minibatch: int | None) -> PlannedRun:
    """Return the run of a recipe or of a network, with this minibatch if it is given.

    Raises UsageError without a minibatch, and for an unknown network.
    """
    if recipe is not None:
        found = run_of(read_recipe(find_recipe(recipe)))
        return found if minibatch is None else replace(found, minibatch=minibatch)
    if minibatch is None:
        raise UsageError("--minibatch is missing: give the samples of a step over all ranks")
    return PlannedRun(model or "", minibatch, {"bsp": BSP()})


def run_of(recipe: Recipe) -> PlannedRun:
    """Return the run of a recipe."""
    data, training = data_of(recipe.data), recipe.training
    autotunes = recipe.compute.convolutions == "autotune"
    return PlannedRun(
        recipe.model.name,
        training.batch,
        {recipe.rule.name: named_rule(recipe.rule, exchange_of(recipe))},
        recipe.model.folder,
        recipe.optimizer.name,
        recipe.optimizer.momentum,
        recipe.optimizer.clip or None,
        recipe.data.size,
        data,
        recipe.parallel,
        Job(training.epochs, data.test, training.checkpoint_every, autotunes=autotunes),
    )


def with_rules(run: PlannedRun, words: str | None, wire: str | None) -> PlannedRun:
    """Return the run with rules such as "bsp,local_sgd:16" in place of its own, and with this wire, if they are given.

    Raises UsageError for an unknown rule.
    """
    if words is not None:
        exchange = next(iter(run.rules.values())).exchange
        run = replace(run, rules={one: rule_of(one, exchange) for one in words.split(",")})
    if wire is not None:
        rules = {name: replace(rule, exchange=replace(rule.exchange, wire=wire)) for name, rule in run.rules.items()}
        run = replace(run, rules=rules)
    return run


def rule_of(words: str, exchange: Exchange) -> BaseRule:
    """Return the rule that words such as "bsp" or "local_sgd:16" name; the number is that of the steps of a period.

    Raises UsageError for an unknown rule, and for a number that it does not have.
    """
    name, colon, steps = words.partition(":")
    options = RuleRecipe(name=name)
    if not colon:
        return named_rule(options, exchange)
    rule = named_rule(replace(options, every=int(steps)) if steps.isdecimal() else options, exchange)
    if not hasattr(rule, "every") or not steps.isdecimal():
        raise UsageError(f"--rule {words}: a number of steps follows local_sgd or diloco, as in local_sgd:16")
    return rule


def network_of(run: PlannedRun, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the network for samples of this shape, without memory for weights.

    Raises RecipeError for an unknown network.
    """
    check_name(run.name, run.folder)
    with torch.device("meta"):
        return make_network(run.name, run.folder, classes, shape[0])


def example_of(network: nn.Module, shape: tuple[int, ...], samples: int) -> Tensor:
    """Return inputs of this shape, (samples, *shape), without memory: tokens where the first layer is an embedding."""
    first = next((module for module in network.modules() if not any(module.children())), None)
    dtype = torch.int64 if isinstance(first, nn.Embedding) else torch.get_default_dtype()
    return torch.empty(samples, *shape, dtype=dtype, device="meta")


def settings_of(run: PlannedRun, nodes: tuple[int, ...], ranks_per_node: int, samples: int) -> RunSettings:
    """Return the settings of the run on these nodes, of layers traced for `samples` samples."""
    return RunSettings(
        minibatch=run.minibatch,
        nodes=nodes,
        rules=run.rules,
        traced=samples,
        ranks_per_node=ranks_per_node,
        kept=numbers_kept(run.optimizer, run.momentum),
        clip=run.clip,
        layer_norms=run.optimizer in LAYER_NORMS,
        epoch_samples=run.data.train,
        samples=run.data.samples,
        slow_nodes=run.slow_nodes,
        simulated=run.simulated,
    )


def changed(run: PlannedRun, machine: MachineFacts, words: str) -> tuple[PlannedRun, MachineFacts]:
    """Return the run and its machine after the changes.

    Raises UsageError for words that are no change, an unknown wire or rule, and a value that the machine does not have.
    """
    for change in words.split(","):
        name, _, value = change.partition("=")
        if name == "wire":
            if value not in WIRES:
                raise UsageError(f"--what-if {words}: there is no wire {value!r}; there are {', '.join(WIRES)}")
            run = with_rules(run, None, value)
        elif name == "rule":
            run = with_rules(run, value, None)
        else:
            machine = changed_machine(machine, change)
    return run, machine
