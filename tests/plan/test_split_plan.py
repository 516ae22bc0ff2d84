"""A planned step with split layers is that of the prediction that a run makes, with the memory of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plan.test_split import cd_dnn, linear

from unisono.plan.bottleneck import StepShares
from unisono.plan.choose_split import rank_splits
from unisono.plan.exchange_cost import ExchangeCost
from unisono.plan.loading import Loading
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_row import PlannedStep
from unisono.plan.run_settings import RunSettings
from unisono.plan.split import PAIR, LayerFacts, SplitCandidate, SplitInputs, candidate
from unisono.plan.split_plan import SplitModel, split_inputs, split_step, without_splits
from unisono.rules import BSP
from unisono.step.costs import Cost

SETTINGS = RunSettings(256, (4,), {"bsp": BSP()}, traced=2)
SLOW, FAST = ExchangeCost("direct", Cost(1e-4, 1.5e-8)), ExchangeCost("direct", Cost(1e-6, 1.5e-11))
WHOLE = PlannedStep(
    "bsp",
    StepShares(0.01, 0.3, 0.004, 0.3, SLOW.cost, Loading(0.1, 0.2, 0.3)),
    RankMemory(100.0, 100.0, 200.0, 0.0, 50.0, 10.0),
    1e6,
    "chain",
    8 << 20,
    "direct",
    None,
)


def of_a_sample(ranks: int) -> tuple[LayerFacts, ...]:
    """Layers with the seconds of a sample on a node of the rate that the tests of splits have."""
    return tuple(one._replace(seconds=one.seconds * ranks / 256) for one in cd_dnn(256))


MODEL = SplitModel(of_a_sample)


def test_inputs_are_those_of_a_run() -> None:
    inputs = split_inputs(SETTINGS, 4, SLOW.cost, MODEL)
    assert (inputs.ranks, inputs.samples, inputs.cost) == (4, 256, pytest.approx((1e-4, 1e-8)))
    assert [one.seconds for one in inputs.layers] == pytest.approx([one.seconds for one in cd_dnn(256)])
    two = split_inputs(replace(SETTINGS, ranks_per_node=2), 2, SLOW.cost, MODEL)  # ranks share their node's computing
    assert sum(one.seconds for one in two.layers) == pytest.approx(2 * sum(one.seconds for one in inputs.layers))


def test_all_ranks_wait_for_the_slowest_node() -> None:
    slow = replace(SETTINGS, slow_nodes={1: 3.0, 9: 5.0})
    inputs, slower = (split_inputs(one, 4, SLOW.cost, MODEL) for one in (SETTINGS, slow))
    assert [one.seconds for one in slower.layers] == pytest.approx([3 * one.seconds for one in inputs.layers])


def test_wide_layers_are_split_where_links_are_slow() -> None:
    found = split_step(SETTINGS, 4, SLOW, WHOLE, MODEL)
    assert found is not None
    inputs = split_inputs(SETTINGS, 4, SLOW.cost, MODEL)
    best = rank_splits(inputs)[0]
    assert found.split == best.words
    assert found.shares.computing == best.prediction.computing
    assert found.shares.communication == best.prediction.gradients + best.prediction.activations
    assert found.shares.communicating >= found.shares.communication
    assert found.exchanged == best.prediction.gradient_bytes + best.prediction.activation_bytes
    assert (found.rule, without_splits(found.rule)) == ("bsp + split layers", "bsp")
    assert split_step(SETTINGS, 4, FAST, WHOLE, MODEL) is None


def test_a_rank_has_its_parts_and_the_samples_of_its_group() -> None:
    pair = (linear("up", 1024, 4096, 128, "down"), linear("down", 4096, 1024, 128), LayerFacts("rest", 0.0, 4 << 20))
    words = dict(zip(("up", "down"), PAIR, strict=True))

    def choose(inputs: SplitInputs) -> SplitCandidate:
        return candidate(inputs, 4, words)

    found = split_step(replace(SETTINGS, minibatch=128), 4, SLOW, WHOLE, SplitModel(lambda _: pair, choose))
    assert found is not None
    share = (4 + 32 / 4) / 36  # MiB of weights
    assert found.memory == pytest.approx((100 * share, 100 * share, 200 * share, 0, 200, 40))
    assert found.shares.update == pytest.approx(0.004 * share)
    assert found.shares.samples == pytest.approx((0.4, 0.8, 1.2))
    assert found.exchanged == pytest.approx(1.6e6 + 1.5 * (4 << 20), rel=0.01)
