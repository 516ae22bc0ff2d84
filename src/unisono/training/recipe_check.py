"""Rule of a recipe, and check of a recipe against a number of ranks, before any is started.

rule of the table    made here, from the recipe's options
module:function      made by the ranks; the launcher asks a process of its own: an import of MPI would begin MPI there

Needs neither PyTorch nor MPI.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain

from unisono.data.options import DataOptions
from unisono.data.order import ShuffleOptions, parse_shuffle
from unisono.data.pack import TRAIN_SAMPLES, train_samples
from unisono.errors import RecipeError
from unisono.models import check_name
from unisono.plan.layer_plan import ParallelPlan, make_plan
from unisono.rules import RULES, BaseRule, Exchange, all_options, find_rule, own_options
from unisono.rules.asynchronous import has_servers
from unisono.schedules import check
from unisono.training.recipe import OWN, AuditRecipe, Recipe, RuleRecipe, rate_at
from unisono.user_function import UserFunction, is_user_function
from unisono.wires import EXACT, WIRES

DEVICE = re.compile(r"[a-z]\w*(:\d{1,3})?")
"""Words for the device of a rank: one of both, a kind of accelerator that PyTorch knows, or one device of a kind."""


def check_run(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError when `ranks` ranks cannot run the recipe. Called before any rank is started."""
    for complaint in chain(_about_data(recipe), _about_options(recipe), _about_ranks(recipe, ranks)):
        raise RecipeError(complaint)


def plan_of(recipe: Recipe, ranks: int) -> ParallelPlan | None:
    """Return the plan of the layers that are split; None where the recipe names none, or leaves them to a prediction.
    Raises UsageError for words that are no split."""
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
    if optimizer.name == "lamb" and optimizer.momentum >= 1:
        yield f"optimizer.momentum = {optimizer.momentum}: it is the first beta of lamb, and below 1"
    epochs = recipe.training.epochs
    try:  # the last step has the largest power of `decay`
        rate = rate_at(optimizer, math.nextafter(epochs, 0), epochs, recipe.training.batch)
    except OverflowError:
        rate = math.inf
    if rate == math.inf:
        yield (
            f"optimizer.decay = {optimizer.decay}, every {optimizer.every} of {epochs} epochs: the learning rate is "
            "beyond all numbers at the end; lower optimizer.decay, or raise optimizer.every"
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
        if rule is not None and rule.exchange.wire == EXACT:
            yield '[parallel] splits layers, which do not sum by the wire "exact", as virtual ranks do: use another'
        for size in sorted({split.ranks for split in plan.values()}):
            if ranks % size:
                yield (
                    f"parallel.layers are split over groups of {size} ranks, which do not divide {ranks} ranks: start "
                    f"a multiple of {size}, or change parallel.ranks"
                )
    yield from about_virtual_ranks(recipe, ranks)
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


def about_virtual_ranks(recipe: Recipe, ranks: int) -> Iterator[str]:
    """Yield complaints about the virtual ranks of a recipe on so many ranks, and about an audit, which needs some."""
    virtual, batch, compute = recipe.training.virtual_ranks, recipe.training.batch, recipe.compute
    if recipe.audit.fraction > 1:
        yield f"audit.fraction = {recipe.audit.fraction}: it is at most 1, where each share is computed again"
    if recipe.audit != AuditRecipe() and not virtual:
        yield "[audit] needs the same bits on any ranks: set training.virtual_ranks, or leave the table away"
    if not virtual:
        return
    named = f"training.virtual_ranks = {virtual}"
    if recipe.exchange.wire not in (OWN, EXACT):
        yield f'{named}, but the sums of exchange.wire = "{recipe.exchange.wire}" depend on the ranks: use "exact"'
    if not (is_user_function(recipe.rule.name) or make_rule(recipe).traits.exact):
        yield f'{named}, but rule.name = "{recipe.rule.name}" does not sum by the wire "exact": use bsp or sharded'
    if virtual < ranks:
        yield f"{named}, but {ranks} ranks: some would have no share; start at most {virtual} ranks, or raise it"
    if batch % virtual:
        yield f"{named} does not divide training.batch = {batch}: shares have equally many samples; change one of them"
    if compute.convolutions == "autotune" and not compute.plan:
        yield f'{named} needs the same algorithms in each run: set compute.convolutions = "library", or compute.plan'


def describe_unused(options: RuleRecipe) -> list[str]:
    """Return a line for each key that a recipe sets and that its rule does not have: it has no effect.

    It is no error: a sweep over rules gives keys of one to the others too.
    """
    known = own_options(options.name)
    return [
        f"rule.{key} = {options.options[key]!r} has no effect with rule.name = {options.name!r}, which has "
        f"{', '.join(known) or 'no keys of its own'}"
        for key, option in all_options(options.name).items()
        if key not in known and options.options[key] != option.default
    ]


def describe_unused_data(options: DataOptions) -> list[str]:
    """Return a line for each key that a recipe sets for a pack, but without one: it has no effect."""
    return [
        f"data.{each.name} = {held!r} has no effect with data.name = {options.name!r}: it is for a data.pack"
        for each in fields(options)
        if not options.pack and each.name not in ("name", "shuffle")
        if (held := getattr(options, each.name)) != each.default
    ]


def describe_wire(recipe: Recipe, nodes: int) -> list[str]:
    """Return a line where the wire of gradients has no effect: schedules convert what goes between nodes alone."""
    wire, library = recipe.exchange.wire, recipe.exchange.algorithm == "library"
    if wire in (OWN, EXACT) or recipe.rule.name not in ("bsp", "sharded") or not (library or nodes == 1):
        return []
    why = 'exchange.algorithm = "library"' if library else "all ranks on one node, which share memory"
    return [f"exchange.wire = {wire!r} has no effect with {why}"]


# Rules ---------------------------------------------------------------------------------------------------------------


def make_rule(recipe: Recipe) -> BaseRule:
    """Return the rule of a recipe, with those of its options that the rule has.

    Raises UsageError for an unknown name and for options that do not fit together, and RecipeError where the user's
    function returns no BaseRule.
    """
    options, sums = recipe.rule, recipe.exchange
    wire = None if sums.wire == OWN else sums.wire
    if wire is None and recipe.training.virtual_ranks:
        wire = EXACT
    largest = max(1, int(sums.bucket_megabytes * (1 << 20))) if sums.bucket_megabytes else None
    exchange = Exchange(sums.algorithm, wire, largest)
    if not is_user_function(options.name):
        chosen = {key: options.options[key] for key in own_options(options.name)}
        return find_rule(options.name)(exchange, options.overlap, **chosen)
    function = own_rule(options)
    rule = function.call(exchange, options.overlap)
    if not isinstance(rule, BaseRule):
        raise function.error(f"it gave {type(rule).__name__}, not a rule that inherits from unisono.rules.BaseRule")
    return rule


def own_rule(rule: RuleRecipe) -> UserFunction:
    """Return the user's function that makes the rule, as the recipe names it."""
    return UserFunction("rule", rule.name, rule.folder, "a rule", "rules:largest", "exchange, overlap")


def user_functions(recipe: Recipe) -> list[UserFunction]:
    functions = UserFunction("model", recipe.model.name, recipe.model.folder), own_rule(recipe.rule)
    return [function for function in functions if is_user_function(function.name)]


LIMIT_SECONDS = 60.0
"""Longest time to make a rule of the user's own."""

ASYNCHRONOUS = 10
"""Exit code of the process that has made an asynchronous rule."""

PROGRAM = "import sys; from unisono.training.recipe_check import answer; sys.exit(answer(*sys.argv[1:]))"


def survives_deaths(recipe: Recipe) -> bool:
    """Return True for a recipe whose rule is asynchronous. A rule of the user's own that cannot be made is not: the
    ranks report why."""
    options = recipe.rule
    if not is_user_function(options.name):
        return has_servers(make_rule(recipe))
    command = [sys.executable, "-P", "-c", PROGRAM, options.name, options.folder, options.overlap]
    try:
        asked = subprocess.run(command, input=b"", capture_output=True, timeout=LIMIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == ASYNCHRONOUS


def answer(name: str, folder: str, overlap: str) -> int:
    """Return the exit code for a rule of the user's own: ASYNCHRONOUS, or 0."""
    return ASYNCHRONOUS if has_servers(make_rule(Recipe(rule=RuleRecipe(name, folder, overlap)))) else 0
