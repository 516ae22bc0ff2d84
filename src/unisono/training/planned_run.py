"""Run to be planned: the network, batch, optimizer, rule and data of a recipe, or those of a command line.

recipe ─┐
options ─┴─▶ PlannedRun ─▶ layers, settings ─▶ plan/run_plan.py         an option goes before the recipe
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.models import check_name, make_network
from unisono.plan.rank_memory import numbers_kept
from unisono.plan.run_settings import RunSettings
from unisono.plan.wall_time import Job
from unisono.rules import BSP, BaseRule, Exchange
from unisono.training.named_rule import named_rule
from unisono.training.packaged_recipes import find_recipe
from unisono.training.planned_data import PlannedData, data_of
from unisono.training.recipe import OWN, ParallelRecipe, Recipe, RuleRecipe
from unisono.training.recipe_file import read_recipe

TRACED_SAMPLES = 2
"""Samples of a trace: batch norm needs more than one."""

LAYER_NORMS = ("lars", "lamb")
"""Optimizers whose step needs norms of whole layers."""

CLASSES = 1000
"""Classes of a network where neither an option nor the data give them: those of ImageNet."""


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
    exchange = Exchange(
        recipe.exchange.algorithm,
        None if recipe.exchange.wire == OWN else recipe.exchange.wire,
        int(recipe.exchange.bucket_megabytes * (1 << 20)) or None,
    )
    data, training = data_of(recipe.data), recipe.training
    autotunes = recipe.compute.convolutions == "autotune"
    return PlannedRun(
        recipe.model.name,
        training.batch,
        {recipe.rule.name: named_rule(recipe.rule, exchange)},
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
