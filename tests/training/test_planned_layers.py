"""Facts of a planned network's layers are those of a run; a recipe's splits are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from tests.plan.test_split import FAST, SLOW
from torch import nn

from unisono.errors import UsageError
from unisono.placement import one_rank_per_node
from unisono.plan.split import LinkCosts, SplitInputs
from unisono.plan.split_plan import SplitModel
from unisono.plan.trace import trace_shapes
from unisono.step.costs import Cost
from unisono.tensor_parallel.choose_plan import inputs_of
from unisono.training.planned_layers import split_model_of
from unisono.training.planned_run import PlannedRun, example_of, network_of, planned_run, with_rules
from unisono.training.recipe import ParallelRecipe

RUN = planned_run(None, "cd_dnn", 256)
NAMES = [name for name, one in network_of(RUN, (440,), 1000).named_modules() if type(one) is nn.Linear]


def model_of(run: PlannedRun = RUN) -> SplitModel:
    network = network_of(run, (440,), 1000)
    return split_model_of(run, network, trace_shapes(network, example_of(network, (440,), 2)), 2)


def inputs(model: SplitModel, cost: Cost = SLOW) -> SplitInputs:
    facts = model.facts(4)
    return inputs_of(facts, {one.name: (1e-3, 2e-3) for one in facts}, 256, one_rank_per_node(4), LinkCosts(cost, cost))


def with_layers(layers: Mapping[str, str], ranks: int = 0) -> PlannedRun:
    return replace(RUN, parallel=ParallelRecipe(ranks, layers))


def test_facts_are_those_of_the_traced_layers() -> None:
    network = network_of(RUN, (440,), 1000)
    layers = trace_shapes(network, example_of(network, (440,), 2)).layers
    facts = model_of().facts(4)
    assert sum(one.weights for one in facts) == sum(one.parameter_bytes for one in layers)
    assert [one.name for one in facts if one.sizes] == NAMES


def test_layers_are_chosen_by_prediction_where_a_recipe_names_none() -> None:
    model = model_of()
    assert model.choose(inputs(model))
    assert not model.choose(inputs(model, FAST))


def test_a_recipes_layers_are_split_as_it_says() -> None:
    words = {NAMES[1]: "column 2 gives part", NAMES[2]: "row 2 takes part", NAMES[4]: "row 4 gives part"}
    words[NAMES[5]] = "column 4 takes part"
    model = model_of(with_layers(words))
    assert model.choose(inputs(model)) == words
    whole = model_of(with_layers({NAMES[1]: "column"}))
    assert whole.choose(inputs(whole)) == {NAMES[1]: "column 4"}
    pair = model_of(with_layers({NAMES[1]: "column gives part", NAMES[2]: "row takes part"}, 2))
    assert pair.choose(inputs(pair)) == {NAMES[1]: "column 2 gives part", NAMES[2]: "row 2 takes part"}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"0": "column 3"}, "groups of 3 do not divide 4 ranks"),
        ({"0": "column 4 gives part"}, "part"),
        ({"nowhere": "column"}, "which the model does not have"),
    ],
)
def test_splits_that_cannot_be_planned(layers: Mapping[str, str], words: str) -> None:
    model = model_of(with_layers({NAMES[int(at)] if at.isdecimal() else at: how for at, how in layers.items()}))
    with pytest.raises(UsageError, match=words) as caught:
        model.choose(inputs(model))
    assert "\n" not in str(caught.value)


def test_nothing_is_split_where_weights_have_to_be_whole() -> None:
    for run in (with_rules(RUN, "local_sgd", None), replace(RUN, optimizer="lamb")):
        model = model_of(run)
        assert not model.choose(inputs(model))
        with pytest.raises(UsageError, match=re.escape("[parallel] names layers, but no rule")):
            model_of(replace(run, parallel=ParallelRecipe(2, {"fc": "column"})))


def test_the_random_numbers_stay() -> None:
    before = torch.random.get_rng_state()
    model_of()
    assert torch.equal(before, torch.random.get_rng_state())
