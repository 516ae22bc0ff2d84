"""Prediction of a run: rows, layers and the wall time of one network that is traced once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.plan.test_split import FAST, SLOW
from torch import nn

from unisono.errors import UsageError
from unisono.placement import one_rank_per_node
from unisono.plan.machines import find_machine
from unisono.plan.measured_rows import CollectiveRow
from unisono.plan.split import LinkCosts, SplitInputs
from unisono.plan.split_plan import SplitModel
from unisono.plan.trace import trace_shapes
from unisono.plan.wall_time import START_SECONDS, STEP_MARGIN
from unisono.step.costs import Cost
from unisono.tensor_parallel.choose_plan import inputs_of
from unisono.training.planned_run import PlannedRun, example_of, network_of, planned_run, with_rules
from unisono.training.prediction import (
    RunPrediction,
    job_of,
    layers_on,
    notes_of,
    predict_rows,
    split_model_of,
    traced_network,
)
from unisono.training.recipe import ParallelRecipe

MACHINE = find_machine("aws_c4_8xlarge")


def predicted(
    rules: str = "bsp", nodes: tuple[int, ...] = (1, 4), parallel: ParallelRecipe | None = None
) -> RunPrediction:
    run = with_rules(planned_run(None, "cd_dnn", 256), rules, None)
    run = replace(run, parallel=parallel or run.parallel, data=run.data._replace(train=2560))
    network = network_of(run, (440,), 1000)
    traced = traced_network(network, example_of(network, (440,), 2))
    return predict_rows(run, MACHINE, traced, nodes, 1)


def test_split_layers_have_a_row_where_they_are_faster() -> None:
    found = {(row.rule, row.nodes): row for row in predicted("bsp,sharded").rows}
    assert set(found) == {(rule, nodes) for rule in ("bsp", "sharded") for nodes in (1, 4)} | {
        ("bsp + split layers", 4),
        ("sharded + split layers", 4),
    }
    split, whole = found["bsp + split layers", 4], found["bsp", 4]
    assert split.step < whole.step / 1.1
    assert split.split
    assert split.memory.weights < whole.memory.weights


def test_layers_add_up_to_the_row() -> None:
    found = predicted()
    rows = {row.nodes: row for row in found.rows}  # the last of 4 nodes is that with splits
    for nodes, row in rows.items():
        layers = layers_on(found, nodes)
        assert sum(one.computing for one in layers) == pytest.approx(row.computing)
        assert sum(one.gradients + one.activations for one in layers) == pytest.approx(row.communicating, rel=0.01)
        assert {one.name: one.parallelism for one in layers if one.parallelism != "data"} == row.split


def test_layers_of_a_simulated_plan_do_not_count_measured_exchanges() -> None:
    row = CollectiveRow("allreduce", "ring", "float32", 4, 4, 8 << 20, 1.0, 0.0)
    found = predicted()
    measured = found._replace(machine=replace(MACHINE, collectives=(row,)))
    simulated = measured._replace(settings=replace(found.settings, simulated=True))
    assert layers_on(simulated, 4) == layers_on(found, 4) != layers_on(measured, 4)


def test_the_layers_of_a_recipe_are_whole_on_one_rank() -> None:
    found = predicted(parallel=ParallelRecipe(2, {"layers.2": "column"}))
    assert [row.parallelism for row in layers_on(found, 4) if row.name == "layers.2"] == ["column 2"]
    assert {row.parallelism for row in layers_on(found, 1)} == {"data"}


def test_the_time_is_that_of_what_the_recipe_splits() -> None:
    whole, split = (predicted(nodes=(4,), parallel=one) for one in (None, ParallelRecipe(layers="auto")))
    assert job_of(whole).steps == pytest.approx(10 * whole.rows[0].step * STEP_MARGIN)
    assert job_of(split).steps == pytest.approx(10 * split.rows[-1].step * STEP_MARGIN)
    assert job_of(split).steps < job_of(whole).steps
    assert job_of(whole).start == START_SECONDS


def test_the_time_is_that_of_one_rule_on_one_number_of_nodes() -> None:
    for found in (predicted(), predicted("bsp,sharded", (4,))):
        with pytest.raises(UsageError, match="--time is that of one rule on one number of nodes"):
            job_of(found)


def test_what_the_rows_leave_out_is_said() -> None:
    assert "give --sample-pixels" in notes_of(predicted(nodes=(1,)))[0]


def test_a_recipe_is_predicted_with_its_data() -> None:
    run = planned_run(Path("digits"), None, None)
    network = network_of(run, (1, 8, 8), 10)
    traced = traced_network(network, example_of(network, (1, 8, 8), 2))
    found = predict_rows(run, MACHINE, traced, (2,), 1)
    assert found.rows[0].epoch == pytest.approx(23 * found.rows[0].step)
    assert job_of(found).tests > 0


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
