"""Check of a recipe against a number of ranks, before any rank is started. Needs neither PyTorch nor MPI."""

from __future__ import annotations

from unisono.data.order import ShuffleOptions, parse_shuffle
from unisono.data.pack.layout import TRAIN_SAMPLES, train_samples
from unisono.errors import RecipeError
from unisono.models import check_name
from unisono.rules import RULES
from unisono.rules.asynchronous import has_servers
from unisono.schedules import check
from unisono.tensor_parallel import ParallelPlan, make_plan
from unisono.training.named_rule import make_rule, own_rule
from unisono.training.recipe import OWN, OptimizerRecipe, Recipe, RuleRecipe
from unisono.user_function import is_user_function
from unisono.wires import WIRES


def check_run(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError when `ranks` ranks cannot run the recipe. Called before any rank is started."""
    check_data(recipe)
    check_name(recipe.model.name, recipe.model.folder)
    check_rule(recipe.rule)
    check_optimizer(recipe.optimizer)
    check_batch(recipe, ranks)
    check_exchange(recipe, ranks)


def check_data(recipe: Recipe) -> None:
    """Raise RecipeError for an unknown data set, for groups without partitions, and for a shuffle of too many parts."""
    data, batch = recipe.data, recipe.training.batch
    if data.name not in TRAIN_SAMPLES and not data.pack:
        raise RecipeError(f"data.name = {data.name!r}; there are {', '.join(TRAIN_SAMPLES)}")
    if data.storage != "partitioned" and data.groups > 1:
        raise RecipeError(
            f'data.groups = {data.groups}, but data.storage = "{data.storage}": only "partitioned" takes groups; leave '
            "groups away"
        )
    shuffle = parse_shuffle(data.shuffle)
    if shuffle.parts > batch:
        raise RecipeError(f"data.shuffle has {shuffle.parts} parts, but training.batch = {batch} samples to divide")


def check_optimizer(optimizer: OptimizerRecipe) -> None:
    """Raise RecipeError for Nesterov momentum of an optimizer without momentum."""
    if optimizer.nesterov and (optimizer.name != "sgd" or not optimizer.momentum):
        raise RecipeError(
            f"optimizer.nesterov = true, but optimizer.name = {optimizer.name!r} and optimizer.momentum = "
            f"{optimizer.momentum}: it needs sgd with a momentum above 0"
        )


def check_batch(recipe: Recipe, ranks: int) -> None:
    """Raise RecipeError for a batch that is larger than the data, or smaller than the number of ranks."""
    batch, data = recipe.training.batch, recipe.data
    samples = train_samples(data.name, data.pack)
    if batch > samples:
        raise RecipeError(f"training.batch = {batch}, but {data.pack or data.name} has {samples} samples to train on")
    check_parallel(recipe, ranks)
    if ranks > batch:
        raise RecipeError(
            f"{ranks} ranks share batches of {batch} samples, so some would have none; "
            f"start at most {batch} ranks, or raise training.batch"
        )


def check_exchange(recipe: Recipe, ranks: int) -> None:
    """Raise UsageError for an unknown wire or algorithm, and for an asynchronous rule that `ranks` ranks cannot run."""
    wire, algorithm = recipe.exchange.wire, recipe.exchange.algorithm
    if wire not in (OWN, *WIRES):
        raise RecipeError(f"exchange.wire = {wire!r}; there are {', '.join((OWN, *WIRES))}")
    if algorithm not in ("auto", "library"):
        check(algorithm)
    if is_user_function(recipe.rule.name):
        return
    rule = make_rule(recipe)
    if has_servers(rule):
        rule.seats(ranks)
        shuffle = parse_shuffle(recipe.data.shuffle)
        if shuffle != ShuffleOptions():
            raise RecipeError(
                f'data.shuffle = "{shuffle}", but workers of rule.name = "{recipe.rule.name}" have samples of their '
                "own and no shuffle; leave it away"
            )


def plan_of(recipe: Recipe, ranks: int) -> ParallelPlan | None:
    """Return the plan of the layers that are split; None where the recipe names none, or leaves them to a prediction.

    Raises UsageError for words that are no split.
    """
    layers = recipe.parallel.layers
    return make_plan(layers, recipe.parallel.ranks or ranks) if layers and not isinstance(layers, str) else None


def check_parallel(recipe: Recipe, ranks: int) -> None:
    """Raise RecipeError where groups do not divide the ranks, or the rule does not take split layers."""
    plan = plan_of(recipe, ranks)
    if plan is None:
        return
    if recipe.rule.name in RULES and not make_rule(recipe).traits.groups:
        raise RecipeError(
            f"rule.name = {recipe.rule.name!r} does not take the split layers of [parallel]: use bsp or sharded"
        )
    for size in plan.sizes:
        if ranks % size:
            raise RecipeError(
                f"parallel.layers are split over groups of {size} ranks, which do not divide {ranks} ranks: start a "
                f"multiple of {size}, or change parallel.ranks"
            )


def check_rule(rule: RuleRecipe) -> None:
    """Raise RecipeError for a name that is no rule, or whose module does not exist."""
    if is_user_function(rule.name):
        own_rule(rule).check()
    elif rule.name not in RULES:
        raise RecipeError(f"rule.name = {rule.name!r}; there are {', '.join(RULES)}, or module:function of your own")
