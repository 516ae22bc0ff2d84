"""A planned step with split layers is that of the prediction that a run makes, with the memory of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from unisono.plan.choose_split import SplitModel
from unisono.plan.exchange_cost import exchange_cost
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import EfficiencyFacts, LinkFacts, MachineFacts, NodeFacts
from unisono.plan.measured_rows import CollectiveRow
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_plan import inputs_of, plan_run
from unisono.plan.run_row import RunPlan
from unisono.plan.split import LayerFacts, SplitInputs, predict_splits, sent_of
from unisono.plan.split_plan import memory_with, split_inputs, without_splits
from unisono.plan.trace import trace
from unisono.rules import BSP, Exchange
from unisono.step.costs import Cost

MACHINE = MachineFacts(
    "example", NodeFacts(flops=1e12, memory_bandwidth=1e11), EfficiencyFacts(0.9, 0.6), LinkFacts(1e8, latency=1e-5)
)
LAYERS = trace(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)), torch.empty(2, 1024))
RUN = PlannedRun(MACHINE, LAYERS, 2, BSP(), 64, 4, samples=SampleFacts(1e6, 1e6), epoch_samples=640)
PAIR = {"0": "column 4 gives part", "2": "row 4 takes part"}


def facts(_: int) -> tuple[LayerFacts, ...]:
    both = {"column": (2, 4), "row": (2, 4)}
    up = LayerFacts("0", 4 * (1024 + 1) * 4096, 4096, 16384, False, sizes=both, partner="2")
    return up, LayerFacts("1", 0, 16384, 16384), LayerFacts("2", 4 * (4096 + 1) * 1024, 16384, 4096, sizes=both)


def named(splits: Mapping[str, str]) -> SplitModel:
    return SplitModel(facts, lambda _: splits)


def given(model: SplitModel, run: PlannedRun = RUN) -> SplitInputs:
    return split_inputs(run, inputs_of(run, run.exchange.cost), model)


def rows(model: SplitModel, run: PlannedRun = RUN) -> dict[tuple[str, int], RunPlan]:
    return {(one.rule, one.nodes): one for one in plan_run(replace(run, split=model), (1, 4))}


def test_the_row_is_that_of_the_predicted_step() -> None:
    found = rows(SplitModel(facts))
    assert list(found) == [("bsp", 1), ("bsp", 4), ("bsp + split layers", 4)]
    whole, split = found["bsp", 4], found["bsp + split layers", 4]
    inputs = given(named(split.split))
    assert split.split == PAIR
    assert split.step - split.loading <= predict_splits(inputs, PAIR).prediction.step * 1.01  # or in better buckets
    assert split.computing == whole.computing
    assert split.step * 1.1 < whole.step
    assert (split.reading, split.decoding, split.samples) == (whole.reading, whole.decoding, whole.samples)
    assert split.communicating >= sum(sent_of(inputs, one, PAIR.get(one.name)).activations for one in inputs.layers)
    assert without_splits(split.rule) == "bsp"


def test_nothing_is_split_where_links_are_fast() -> None:
    fast = replace(MACHINE, link=LinkFacts(1e12), node=NodeFacts(flops=1e12))  # updates would be shorter, too
    assert {rule for rule, _ in rows(SplitModel(facts), replace(RUN, machine=fast))} == {"bsp"}


def test_a_rank_has_its_parts_and_keeps_the_inputs_of_its_group() -> None:
    """16 samples on each of 4 ranks; all but biases of 32 MiB of weights."""
    found = rows(named(PAIR))
    whole, split = found["bsp", 4].memory, found["bsp + split layers", 4].memory
    assert split[:3] == pytest.approx([one / 4 for one in whole[:3]])
    assert split.activations - whole.activations == 4 * 16 * 4096
    assert split.samples == whole.samples
    inputs = given(named(PAIR))
    row = memory_with({"2": "row 4"}, whole, inputs)
    assert row.activations - whole.activations == 16 * 16384
    assert row.weights == pytest.approx(whole.weights - 3 / 4 * 4 * 4097 * 1024)


def test_links_have_the_costs_of_the_machine() -> None:
    """Gradients are encoded, activations are not; a byte of an allreduce of 4 ranks is sent 1.5 times."""
    encoded = replace(RUN, rule=BSP(Exchange(wire="bfloat16")))
    links, plain = given(named({}), encoded).links, exchange_cost(MACHINE, 4, 1).cost
    assert links.activations.network == pytest.approx((plain.latency, plain.per_byte / 1.5))
    assert links.gradients.network.per_byte < 0.6 * links.activations.network.per_byte
    assert links.activations.node == Cost(0.0, 0.0)
    row = CollectiveRow("allreduce", "direct", "float32", 1, 2, 1 << 20, 0.01, 0.0)
    known = replace(MACHINE, collectives=(row,))
    measured = given(named({}), replace(RUN, machine=known, nodes=2, ranks_per_node=2))
    assert measured.links.activations.node.seconds(1 << 20) == pytest.approx(0.01)


def test_groups_of_several_sizes_are_planned() -> None:
    splits = {"0": "column 4", "2": "row 2"}
    row = rows(named(splits))["bsp + split layers", 4]
    assert row.split == splits
    assert row.memory.weights == pytest.approx(4 * (4097 * 1024 / 2 + 1025 * 4096 / 4))
