"""Check of a recipe against a number of ranks, before any rank is started. Needs neither PyTorch nor MPI."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unisono.data.order import ShuffleOptions, parse_shuffle
from unisono.data.pack.layout import TRAIN_SAMPLES, train_samples
from unisono.errors import RecipeError
from unisono.models import check_name
from unisono.rules import RULES
from unisono.rules.asynchronous import has_servers
from unisono.schedules import check
from unisono.tensor_parallel import ParallelPlan, make_plan
from unisono.training.named_rule import make_rule, own_rule
from unisono.training.recipe import OWN, Recipe
from unisono.user_function import is_user_function
from unisono.wires import WIRES

DEVICE = re.compile(r"[a-z]\w*(:\d{1,3})?")
"""Words for the device of a rank: one of both, a kind of accelerator that PyTorch knows, or one device of a kind."""


def check_run(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError when `ranks` ranks cannot run the recipe. Called before any rank is started."""
    for complaints in (_about_data(recipe), _about_options(recipe), _about_ranks(recipe, ranks)):
        for complaint in complaints:
            raise RecipeError(complaint)


def plan_of(recipe: Recipe, ranks: int) -> ParallelPlan | None:
    """Return the plan of the layers that are split; None where the recipe names none, or leaves them to a prediction.

    Raises UsageError for words that are no split.
    """
    layers = recipe.parallel.layers
    return make_plan(layers, recipe.parallel.ranks or ranks) if layers and not isinstance(layers, str) else None


def _about_data(recipe: Recipe) -> Iterator[str]:
    data, batch = recipe.data, recipe.training.batch
    if data.name not in TRAIN_SAMPLES and not data.pack:
        yield f"data.name = {data.name!r}; there are {', '.join(TRAIN_SAMPLES)}"
    shuffle = parse_shuffle(data.shuffle)
    if shuffle.parts > batch:
        yield f"data.shuffle has {shuffle.parts} parts, but training.batch = {batch} samples to divide"
    samples = train_samples(data.name, data.pack)
    if batch > samples:
        yield f"training.batch = {batch}, but {data.pack or data.name} has {samples} samples to train on"


def _about_options(recipe: Recipe) -> Iterator[str]:
    check_name(recipe.model.name, recipe.model.folder)
    rule, optimizer, exchange = recipe.rule, recipe.optimizer, recipe.exchange
    if is_user_function(rule.name):
        own_rule(rule).check()
    elif rule.name not in RULES:
        yield f"rule.name = {rule.name!r}; there are {', '.join(RULES)}, or module:function of your own"
    if optimizer.nesterov and (optimizer.name != "sgd" or not optimizer.momentum):
        yield (
            f"optimizer.nesterov = true, but optimizer.name = {optimizer.name!r} and optimizer.momentum = "
            f"{optimizer.momentum}: it needs sgd with a momentum above 0"
        )
    if not DEVICE.fullmatch(recipe.compute.device):
        yield f'compute.device = {recipe.compute.device!r}; there are "auto", "cpu" and the kinds that PyTorch has'
    if exchange.wire not in (OWN, *WIRES):
        yield f"exchange.wire = {exchange.wire!r}; there are {', '.join((OWN, *WIRES))}"
    if exchange.algorithm not in ("auto", "library"):
        check(exchange.algorithm)


def _about_ranks(recipe: Recipe, ranks: int) -> Iterator[str]:
    batch = recipe.training.batch
    rule = None if is_user_function(recipe.rule.name) else make_rule(recipe)
    if (plan := plan_of(recipe, ranks)) is not None:
        if rule is not None and not rule.traits.groups:
            yield f"rule.name = {recipe.rule.name!r} does not take the split layers of [parallel]: use bsp or sharded"
        for size in plan.sizes:
            if ranks % size:
                yield (
                    f"parallel.layers are split over groups of {size} ranks, which do not divide {ranks} ranks: start "
                    f"a multiple of {size}, or change parallel.ranks"
                )
    if ranks > batch:
        yield (
            f"{ranks} ranks share batches of {batch} samples, so some would have none; start at most {batch} ranks, or "
            "raise training.batch"
        )
    if rule is not None and has_servers(rule):
        rule.seats(ranks)
        if (shuffle := parse_shuffle(recipe.data.shuffle)) != ShuffleOptions():
            yield (
                f'data.shuffle = "{shuffle}", but workers of rule.name = "{recipe.rule.name}" have samples of their '
                "own and no shuffle; leave it away"
            )
