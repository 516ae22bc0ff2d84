"""Facts of a planned network's layers are those of a run, with the seconds of a machine; a recipe's splits are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.plan.layer_costs import computing_of
from unisono.plan.machines import EfficiencyFacts, LinkFacts, MachineFacts, NodeFacts
from unisono.plan.split import SplitInputs
from unisono.plan.split_plan import SplitModel
from unisono.plan.trace import trace
from unisono.step.costs import Cost
from unisono.training.planned_layers import split_model_of
from unisono.training.planned_run import PlannedRun, example_of, network_of, planned_run, with_rules
from unisono.training.recipe import ParallelRecipe

MACHINE = MachineFacts("example", NodeFacts(flops=1e12), EfficiencyFacts(0.9, 0.6), LinkFacts(1e8))
RUN = planned_run(None, "cd_dnn", 256)
SLOW, FAST = Cost(1e-4, 1e-8), Cost(1e-6, 1e-12)


def model_of(run: PlannedRun = RUN, classes: int = 1000) -> SplitModel:
    network = network_of(run, (440,), classes)
    example = example_of(network, (440,), 2)
    return split_model_of(run, MACHINE, network, example, trace(network, example))


def inputs_of(model: SplitModel, cost: Cost = SLOW) -> SplitInputs:
    return SplitInputs(model.facts(4), 4, 256, cost)


def with_layers(layers: Mapping[str, str], ranks: int = 0) -> PlannedRun:
    return replace(RUN, parallel=ParallelRecipe(ranks, layers))


def test_layers_take_as_long_as_a_step_does() -> None:
    network = network_of(RUN, (440,), 1000)
    example = example_of(network, (440,), 2)
    layers = trace(network, example)
    facts = model_of().facts(4)
    assert sum(one.seconds for one in facts) == pytest.approx(computing_of(layers, MACHINE, 2, 1).whole)
    assert sum(one.weights for one in facts) == sum(one.parameter_bytes for one in layers)
    assert {one.name for one in facts if one.sizes} == {
        name for name, one in network.named_modules() if type(one) is nn.Linear
    }


def test_layers_are_chosen_by_prediction_where_a_recipe_names_none() -> None:
    model = model_of()
    assert model.choose(inputs_of(model)).size == 4
    assert model.choose(inputs_of(model, FAST)).size == 1


def test_a_recipes_layers_are_split_as_it_says() -> None:
    names = [name for name, one in network_of(RUN, (440,), 1000).named_modules() if type(one) is nn.Linear]
    model = model_of(with_layers({names[1]: "column gives part", names[2]: "row takes part"}, 2))
    chosen = model.choose(inputs_of(model))
    assert chosen.words == {names[1]: "column 2 gives part", names[2]: "row 2 takes part"}
    whole = model_of(with_layers({names[1]: "column"}))
    assert whole.choose(inputs_of(whole)).words == {names[1]: "column 4"}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({"0": "column 2", "1": "column 4"}, "groups of 2, 4 ranks: only groups of one size are planned"),
        ({"0": "column 3"}, "groups of 3 do not divide 4 ranks"),
        ({"0": "column 4 gives part", "1": "row 4 takes part", "2": "row 4 takes part gives part"}, "part"),
        ({"nowhere": "column"}, "which the model does not have"),
    ],
)
def test_splits_that_cannot_be_planned(layers: Mapping[str, str], words: str) -> None:
    names = [name for name, one in network_of(RUN, (440,), 1000).named_modules() if type(one) is nn.Linear]
    model = model_of(with_layers({names[int(at)] if at.isdecimal() else at: how for at, how in layers.items()}))
    with pytest.raises(UsageError, match=words) as caught:
        model.choose(inputs_of(model))
    assert "\n" not in str(caught.value)


def test_nothing_is_split_where_weights_have_to_be_whole() -> None:
    for run in (with_rules(RUN, "sharded", None), replace(RUN, optimizer="lamb")):
        model = model_of(run)
        assert not model.choose(inputs_of(model)).splits
        with pytest.raises(UsageError, match=re.escape("[parallel] names layers, but no rule")):
            model_of(replace(run, parallel=ParallelRecipe(2, {"fc": "column"})))


def test_the_random_numbers_stay() -> None:
    before = torch.random.get_rng_state()
    model_of()
    assert torch.equal(before, torch.random.get_rng_state())
