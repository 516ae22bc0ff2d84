"""Plan of a recipe with `parallel.layers = "auto"`: chosen from its network on zeros, before the run makes its own.

feed ─ network from the seed ─ forward passes on a rank's share of a batch ─ plan ─ (another feed, for its groups)
"""

from __future__ import annotations

from unisono.data.feed import InputFacts
from unisono.data.loading import cast_inputs
from unisono.rules import BaseRule
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel.choose_plan import PlanChoice, choose_plan, whole_layers
from unisono.training.build import DTYPES, context_of, make_model
from unisono.training.recipe import Recipe
from unisono.world import World


def choose_layers(recipe: Recipe, world: World, feed: InputFacts, rule: BaseRule) -> PlanChoice:
    """Return the plan of the layers, the same on all ranks, which call this together, and lines about it.

    `feed` gives the shapes of the network's inputs; nothing is read from it.
    """
    whole = whole_layers(rule, recipe.optimizer.name)
    if whole is not None:
        return whole
    model = make_model(recipe, feed).train()
    first, last = bounds(recipe.training.batch, world.size, world.rank)
    example = cast_inputs(feed.blank(last - first), DTYPES[recipe.model.dtype])
    return choose_plan(model, world, example, within=context_of(recipe), deferred=True)
