"""Predictions of the papers' figures: what the package has is what the functions give."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from benchmarks.seeds.networks import moved_bytes
from benchmarks.seeds.pcl_dnn import images_per_second, in_use
from benchmarks.seeds.run import as_data, predictions
from benchmarks.seeds.swcaffe import NODES, RUNS, share_of, words_of
from benchmarks.seeds.theirs import theirs

from unisono.models import make_network
from unisono.papers.figures import PREDICTED, data, find_figure
from unisono.papers.report import near_of, predicted_rows
from unisono.plan.machines import find_machine
from unisono.plan.run_plan import plan_run
from unisono.tensor_parallel.model import check_plan
from unisono.training.recipe_plan import plan_recipe, planned_run

all_predictions = cache(predictions)


def test_the_package_has_what_the_functions_give() -> None:
    """All but the values is the same; these are near, as an equation may sum in another order."""
    there, made = data(PREDICTED), as_data(all_predictions())
    values = [
        [row.pop(key, math.nan) for rows in figures.values() for row in rows.values() for key in ("ours", "fitted")]
        for figures in (there, made)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-3, nan_ok=True)
    assert there == made


def test_swcaffes_speedups_agree_with_its_shares_of_communication() -> None:
    """6.3 pairs them in the same order: 1,024 (1 - share) is the speedup, of both networks."""
    for run in RUNS:
        assert NODES * (1 - share_of(*run)) == pytest.approx(
            theirs("swcaffe-figure-10", f"speedup, {words_of(*run)}"), rel=0.015
        )


def test_cd_dnns_rates_are_close_with_the_minibatch_of_the_papers_other_runs() -> None:
    """Their quotient, the speedup of 16 nodes, is 16% too high: rates are 9% too low on one node, 7% too high on 16."""
    rows = find_figure("pcl-dnn-figure-7").rows
    assert [row.close(row.prediction.ours) for row in rows] == [True, True, True, False]


def test_30_predictions_are_close_with_nothing_fitted_and_40_with_measurements() -> None:
    plain, fitted = near_of(predicted_rows()).values()
    assert (plain >= 30, fitted >= 40) == (True, True)


def test_layers_without_products_move_what_they_read_and_write() -> None:
    """OverFeat-FAST: relus after 5 convolutions and 2 linear layers, 3 pools, 2 dropouts."""
    convolutions, linear = (96 * 56**2, 256 * 24**2, 512 * 12**2, 1024 * 12**2, 1024 * 12**2), (3072, 4096)
    pooled = 96 * 28**2 + 256 * 12**2 + 1024 * 6**2
    read = sum(convolutions) + 2 * sum(linear) + convolutions[0] + convolutions[1] + convolutions[4]
    written = sum(convolutions) + 2 * sum(linear) + pooled
    assert moved_bytes("overfeat_fast", training=False) == 4 * (read + written)
    assert moved_bytes("overfeat_fast") == 4 * (2 * read + 3 * written)


def test_a_node_in_use_is_slower_than_its_peak() -> None:
    """31 of 32 cores at 1.9 of 2.3 GHz."""
    cori = in_use("cori_aries")
    assert cori.node.flops == pytest.approx(31 * 1.9e9 * 32)
    assert images_per_second("vgg_a", cori) < images_per_second("vgg_a", cori, training=False) / 2.5


def test_the_example_of_the_page() -> None:
    """VGG-A on 16 nodes with 10 Gbit/s Ethernet: 486 of 502 ms are computing; PCL-DNN measured a speedup of 14.2."""
    run = planned_run(plan_recipe(None, "vgg_a", ["training.batch=256"]), find_machine("aws_c4_8xlarge"), 16)
    row = min(plan_run(run, (16,)), key=lambda row: row.step)
    assert (row.computing, row.step) == (pytest.approx(0.486, abs=5e-4), pytest.approx(0.502, abs=5e-4))
    assert row.speedup == pytest.approx(15.5, abs=0.05) == pytest.approx(14.2, rel=0.15)
    assert {name: str(split) for name, split in row.split.items()} == {
        "classifier.1": "row 16",
        "classifier.4": "column 8 gives part",
        "classifier.7": "row 8 takes part",
    }
    with torch.device("meta"):
        network = make_network("vgg_a", "", 1000, 3)
    assert check_plan(row.split, network, 16).splits == row.split, "ranks can run it"


def test_the_exchanges_of_theano_mpi_follow_from_a_rate_and_a_cost_of_each_array() -> None:
    rows = {row.quantity: row for row in find_figure("theano-mpi-table-3").rows}
    for exchange in ("AlexNet-32b, AR", "AlexNet-32b, ASA", "AlexNet-32b, ASA16", "GoogLeNet-32b, ASA16"):
        row = rows[f"exchange of 5,120 images, {exchange}"]
        assert not row.close(row.prediction.ours), exchange
        assert row.close(row.prediction.fitted), exchange
