"""Prediction of a run: rows, layers and the wall time of one network that is traced once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.plan.machines import find_machine
from unisono.plan.measured_rows import CollectiveRow
from unisono.plan.wall_time import START_SECONDS, STEP_MARGIN
from unisono.training.planned_run import example_of, network_of, planned_run, with_rules
from unisono.training.prediction import RunPrediction, job_of, layers_on, notes_of, predict_rows, traced_network
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
