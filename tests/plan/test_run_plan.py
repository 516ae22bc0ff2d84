"""Plans of runs: what they are made of is what a run would predict, and better machines are never slower.

A step with split layers is that of the prediction that a run makes, with the memory of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unisono.errors import UsageError
from unisono.foresight.ledger import read
from unisono.plan.bucket_layout import buckets_of
from unisono.plan.choose import PredictionInputs, candidates, with_buckets
from unisono.plan.collective_costs import exchange_cost
from unisono.plan.layer_plan import COLUMN, ROW, Split, make_plan
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import (
    CollectiveRow,
    DecodingFacts,
    DiskFacts,
    EfficiencyFacts,
    LinkFacts,
    MachineFacts,
    NodeFacts,
    changed_machine,
)
from unisono.plan.planned_run import PlannedRun, computing_of, memory_with, rank_memory
from unisono.plan.run_plan import (
    INTERVAL_ERROR,
    INTERVAL_SHARE,
    WITH_SPLITS,
    RunPlan,
    even_cost,
    inputs_of,
    plan_run,
    predict_step,
    split_inputs,
    update_seconds,
)
from unisono.plan.split import LayerFacts, SplitInputs, SplitModel, predict_splits, sent_of, with_splits
from unisono.plan.trace import TracedLayer, trace
from unisono.rules import BSP, EASGD, BaseRule, Exchange, LocalSGD, Sharded
from unisono.rules.sharded import UPDATE_SHARD
from unisono.step.costs import Cost, Costs
from unisono.step.layout import Layout
from unisono.step.predict import on_streams, predict
from unisono.step.program import Step

MACHINE = MachineFacts(
    "example",
    NodeFacts(flops=1e12, memory_bytes=1e9, memory_bandwidth=1e11),
    EfficiencyFacts(0.9, 0.6),
    LinkFacts(1e9, latency=1e-5),
)
RULES = {"bsp": BSP(), "sharded": Sharded(), "local_sgd:4": LocalSGD(every=4)}


def network() -> list[TracedLayer]:
    wide = (nn.Linear(400, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10))
    return trace(nn.Sequential(*wide), torch.empty(2, 400)).layers


LAYERS = network()
RUN = PlannedRun(MACHINE, LAYERS, 2, BSP(), 64)


def plans(run: PlannedRun = RUN, rules: Mapping[str, BaseRule] = RULES) -> dict[tuple[str, int], RunPlan]:
    runs = (replace(run, rule=rule, rule_name=name) for name, rule in rules.items())
    return {(row.rule, row.nodes): row for run in runs for row in plan_run(run, (1, 2, 4))}


@cache
def usual() -> dict[tuple[str, int], RunPlan]:
    return plans()


def on(machine: MachineFacts, **changes: Any) -> PlannedRun:
    return replace(RUN, machine=machine, **changes)


def test_one_node_has_no_communication() -> None:
    for rule in RULES:
        alone = usual()[rule, 1]
        assert (alone.communication, alone.communicating, alone.schedule, alone.speedup) == (0, 0, "", 1)
        assert alone.low == alone.step == alone.high


@pytest.mark.parametrize("change", ["bandwidth=2x", "latency=0.5x", "flops=2x", "memory_bandwidth=2x"])
def test_a_faster_machine_is_never_slower(change: str) -> None:
    before, after = usual(), plans(on(changed_machine(MACHINE, change)))
    assert all(after[key].step <= before[key].step * 1.01 for key in before)  # settings within 1% count as equal
    assert any(after[key].step < before[key].step for key in before)


def test_copies_between_an_accelerator_and_the_host_take_time_beside_computing() -> None:
    def step(to_host: float, to_device: float) -> float:
        node = replace(MACHINE.node, to_host=to_host, to_device=to_device)
        return plans(on(replace(MACHINE, node=node)))["bsp", 4].step

    alone = step(0, 0)
    assert alone <= step(1e11, 1e11) < step(1e9, 1e9) < step(1e9, 5e8)
    nbytes = sum(layer.parameter_bytes for layer in LAYERS)
    assert step(1e9, 1e9) < alone + 2 * nbytes / 1e9


@pytest.mark.parametrize("rule", RULES)
def test_copies_are_tasks_on_a_lane_for_each_direction(rule: str) -> None:
    """The accelerators of a node share its rates, as its ranks do."""

    def seconds(**node: Any) -> dict[str, float]:
        machine = replace(MACHINE, node=replace(MACHINE.node, **node))
        played = predict_step(on(machine, rule=RULES[rule], nodes=4), Cost(1e-5, 2e-9))[1]
        by_lane: dict[str, float] = {}
        for step in range(played.rule.traits.period):
            for task in on_streams(played.rule(Step(step), 0, played.costs.layout), played.costs):
                by_lane[task.lane] = by_lane.get(task.lane, 0.0) + task.operation.price(task, played.costs).seconds
        return by_lane

    assert not {"to_host", "to_device"} & seconds().keys()
    single, double = seconds(to_host=1e9, to_device=2e9), seconds(to_host=1e9, to_device=2e9, accelerators=2)
    nbytes = sum(layer.parameter_bytes for layer in LAYERS)
    assert single["to_host"] == pytest.approx(2 * single["to_device"])
    assert single["to_host"] == pytest.approx(nbytes / 1e9, rel=1e-3)  # and flags
    assert double["to_host"] == pytest.approx(2 * single["to_host"])


def test_frozen_layers_are_not_exchanged() -> None:
    body, head = nn.Linear(400, 1000), nn.Linear(1000, 10)
    layers = trace(nn.Sequential(body.requires_grad_(False), head), torch.empty(2, 400)).layers
    buckets = inputs_of(replace(RUN, layers=layers), Cost(1e-5, 2e-9)).buckets(10**6, 1.0)
    assert 4 * 10_010 <= sum(bucket.nbytes for bucket in buckets) < 4 * 10_100  # flags, and padding


def test_a_step_is_what_predict_gives_for_its_setting() -> None:
    row, cost = usual()["bsp", 4], exchange_cost(MACHINE, 4, 1).cost
    computing = replace(computing_of(LAYERS, MACHINE, 2, 16), update=update_seconds(RUN))
    sizes = [layer.parameter_bytes for layer in LAYERS if layer.parameters]
    layout = Layout(4, len(sizes), ())
    inputs = PredictionInputs(BSP(), Costs(layout, computing, cost), partial(buckets_of, sizes))
    best = candidates(inputs)[0]
    assert (row.overlap, row.bucket_bytes) == best.setting[:2]
    buckets = inputs.buckets(row.bucket_bytes, best.setting.end_ratio)
    sent = [buckets[index] for index in best.setting.sequence] or buckets
    rule = BSP(overlap=row.overlap, outstanding=best.setting.outstanding)
    expected = predict(rule, Costs(with_buckets(layout, computing, sent), computing, cost))
    assert row.step == pytest.approx(expected.step)
    assert row.communicating == expected.communicating
    assert row.step == row.computing + row.communication + row.update


def test_many_ranks_share_the_updates_of_a_sharded_rule_alike_if_fewer_are_played(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost = Cost(1e-5, 2e-9)
    sharded = replace(RUN, rule=Sharded(), nodes=32)
    before = predict_step(sharded, cost)[1].prediction
    monkeypatch.setattr("unisono.plan.run_plan.MAX_PLAYED_RANKS", 8)
    assert predict_step(sharded, cost)[1].prediction.step == pytest.approx(before.step)


def test_memory_of_a_sharded_rule_is_smaller() -> None:
    for nodes in (2, 4):
        replicated, sharded = (usual()[rule, nodes].memory for rule in ("bsp", "sharded"))
        assert sharded.optimizer == replicated.optimizer / nodes
        assert sharded.total < replicated.total


def test_a_narrow_wire_sends_less_and_less_of_it_where_weights_are_gathered() -> None:
    narrow = {name: replace(rule, exchange=Exchange(wire="bfloat16")) for name, rule in RULES.items()}
    slow = changed_machine(MACHINE, "bandwidth=0.1x")
    before, after = plans(on(slow)), plans(on(slow), narrow)
    saved = {rule: 1 - after[rule, 4].communicating / before[rule, 4].communicating for rule in RULES}
    assert saved["bsp"] == pytest.approx(0.5, abs=0.02)
    assert saved["sharded"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int4"])
def test_an_exchange_of_a_period_counts_its_wire_once(wire: str | None) -> None:
    slow = changed_machine(MACHINE, "bandwidth=0.01x")
    planned = plans(on(slow), {"local": LocalSGD(Exchange(wire=wire), every=4)})["local", 4]
    cost = exchange_cost(slow, 4, 1, wire).cost
    expected = cost.per_byte * sum(layer.parameter_bytes for layer in LAYERS)
    assert 4 * planned.communicating == pytest.approx(expected, rel=0.05)


def test_measured_exchanges_are_those_of_the_plan_also_within_a_node() -> None:
    rows = tuple(
        CollectiveRow("allreduce", "direct", "float32", nodes, 2 * nodes, nbytes, nbytes * 1e-9 * nodes, 0.0)
        for nodes in (1, 2)
        for nbytes in (1 << 19, 8 << 20)
    )
    planned = plans(on(replace(MACHINE, collectives=rows), ranks_per_node=2))
    assert [planned["bsp", nodes].basis for nodes in (1, 2, 4)] == ["measured", "measured", "corrected"]
    assert planned["bsp", 1].communicating > 0
    assert planned["bsp", 1].speedup == pytest.approx(1)
    assert [plans(replace(RUN, ranks_per_node=2))["bsp", nodes].basis for nodes in (1, 2)] == ["", "estimated"]


def test_a_slow_link_is_named_and_its_cost_is_the_step_without_it() -> None:
    slow, even = plans(on(replace(MACHINE, slow_links={2: 20.0})))["bsp", 4], usual()["bsp", 4]
    lost = slow.step - even.step
    assert slow.bottleneck.startswith(f"node 2's link, 20 times slower: {lost * 1e3:.3g} ms of the step; ")
    assert plans(on(replace(MACHINE, slow_links={2: 20.0})))["bsp", 2] == usual()["bsp", 2]


def test_a_slow_link_that_was_measured_is_named_as_well() -> None:
    slow = replace(MACHINE, slow_links={2: 20.0})
    took = {nbytes: 1.2 * exchange_cost(slow, 4, 1).cost.seconds(nbytes) for nbytes in (1 << 19, 8 << 20)}
    rows = tuple(CollectiveRow("allreduce", "direct", "float32", 4, 4, *timing, 0.0) for timing in took.items())
    planned = plans(on(replace(slow, collectives=rows)))["bsp", 4]
    assert planned.basis == "measured"
    assert planned.bottleneck.startswith("node 2's link, 20 times slower: ")


@pytest.mark.parametrize("rule", [BSP(), Sharded()])
def test_the_cost_without_slow_links(rule: BaseRule) -> None:
    slow = replace(MACHINE, slow_links={2: 4.0})
    known, even = (replace(RUN, machine=machine, rule=rule, nodes=4) for machine in (slow, MACHINE))
    assert known.exchange.cost.per_byte > even.exchange.cost.per_byte
    assert even_cost(known) == pytest.approx(even.exchange.cost)
    took = {nbytes: 1.2 * exchange_cost(slow, 4, 1).cost.seconds(nbytes) for nbytes in (1 << 19, 8 << 20)}
    rows = tuple(CollectiveRow("allreduce", "direct", "float32", 4, 4, *timing, 0.0) for timing in took.items())
    evened = even_cost(replace(RUN, machine=replace(slow, collectives=rows), nodes=4))
    assert evened.seconds(8 << 20) == pytest.approx(1.2 * exchange_cost(MACHINE, 4, 1).cost.seconds(8 << 20))


def test_rarer_exchanges_cost_less() -> None:
    rules = {str(every): LocalSGD(every=every) for every in (1, 4, 16)}
    planned = plans(on(changed_machine(MACHINE, "bandwidth=0.1x")), rules)
    steps = [planned[every, 4].step for every in ("1", "4", "16")]
    assert steps == sorted(steps, reverse=True)


def test_ranks_of_a_node_share_its_computing_and_its_memory() -> None:
    single, four = usual()["bsp", 2], plans(replace(RUN, ranks_per_node=4))["bsp", 2]
    assert four.ranks == 8
    assert four.samples == single.samples / 4
    assert four.computing == pytest.approx(single.computing)
    assert four.schedule.startswith("hierarchical")


def test_each_accelerator_updates_all_weights() -> None:
    """A rank that stands for several has all of these to update."""
    node = replace(MACHINE.node, accelerators=4, device_bandwidth=1e11)
    single, four, eight = (update_seconds(on(replace(MACHINE, node=node), ranks_per_node=each)) for each in (1, 4, 8))
    assert single == four == pytest.approx(eight / 2)
    shards = [
        update_seconds(on(replace(MACHINE, node=node), ranks_per_node=each, rule=Sharded())) / each for each in (1, 4)
    ]
    assert shards[0] == shards[1]  # of which each has its part, whatever a rank stands for


def test_the_interval_is_that_of_measured_runs() -> None:
    entries, complaints = read(Path(__file__).parents[2] / "benchmarks/foresight/calibration/calibration.jsonl")
    errors = [abs(entry.measurement.step.median / entry.prediction.step - 1) for entry in entries]
    assert not complaints
    assert round(float(np.quantile(errors, INTERVAL_SHARE)), 3) == INTERVAL_ERROR
    row = usual()["bsp", 4]
    assert row.high == pytest.approx(row.step * (1 + INTERVAL_ERROR))
    assert row.computing + row.update <= row.low < row.step


def test_the_speedup_of_one_node_is_one_where_its_ranks_exchange_and_decode() -> None:
    """Decoding takes turns with computing, not with the exchange within the node."""
    rows = tuple(CollectiveRow("allreduce", "direct", "float32", 1, 2, size, size * 4e-9, 0.0) for size in (1024, 8192))
    node = replace(MACHINE.node, cores=2)
    machine = replace(MACHINE, node=node, collectives=rows, decoding=DecodingFacts(1e7))
    (row,) = plan_run(on(machine, ranks_per_node=2, samples=SampleFacts(pixels=2e3)), (1,))
    assert min(row.communication, row.decoding) > 0
    assert row.speedup == 1


def test_a_step_takes_as_long_as_its_loading() -> None:
    node = replace(MACHINE.node, cores=4, accelerators=1)
    machine = replace(MACHINE, node=node, decoding=DecodingFacts(1e6), disk=DiskFacts(1e6))
    samples = SampleFacts(nbytes=1e5, pixels=1e6, threads=2)
    decoded = plans(on(machine, samples=samples))["bsp", 4]
    assert decoded.decoding == decoded.step == decoded.low == decoded.high == 16 * 1e6 / (2 * 1e6)
    assert decoded.step == pytest.approx(decoded.computing + decoded.communication + decoded.update + decoded.loading)
    assert decoded.bottleneck.startswith("starved: decoding takes 8e+03 ms")
    assert decoded.speedup == pytest.approx(4)  # one node loads four times as many samples
    read = plans(on(machine, samples=samples._replace(pixels=0, from_disk=True)))["bsp", 4]
    assert read.reading == read.step == pytest.approx(1.6)
    in_memory = plans(on(machine, samples=samples._replace(pixels=0)))["bsp", 4]
    assert (in_memory.loading, in_memory.step) == (0, usual()["bsp", 4].step)


def test_samples_in_memory_are_part_of_a_ranks_memory() -> None:
    planned = plans(replace(RUN, samples=SampleFacts(nbytes=1e3), epoch_samples=6400))
    assert [planned["bsp", nodes].memory.samples for nodes in (1, 4)] == [6.4e6, 1.6e6]


def test_an_epoch_has_all_its_samples() -> None:
    row = plans(replace(RUN, epoch_samples=100))["bsp", 2]
    assert row.epoch == 2 * row.step


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (replace(RUN, minibatch=3), "a minibatch of 3 is less than a sample for each of 4 ranks"),
        (on(replace(MACHINE, node=NodeFacts())), "example has no node.flops"),
        (on(replace(MACHINE, link=LinkFacts())), r"example has no link.bandwidth: .*; add to it: \[link\] band"),
        (replace(RUN, rule=EASGD(), rule_name="easgd"), "rule easgd has no step that all ranks make together"),
        (replace(RUN, layers=trace(nn.ReLU(), torch.empty(2, 3)).layers), "no parameters"),
        (
            on(replace(MACHINE, node=NodeFacts(flops=1e12)), layers=trace(nn.LayerNorm(3), torch.empty(2, 3)).layers),
            "none of the model's layers makes a product, and example has no node.memory_bandwidth",
        ),
    ],
)
def test_what_cannot_be_planned(run: PlannedRun, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_run(run, (1, 2, 4))


WIDE_MACHINE = MachineFacts(
    "example", NodeFacts(flops=1e12, memory_bandwidth=1e11), EfficiencyFacts(0.9, 0.6), LinkFacts(1e8, latency=1e-5)
)
WIDE_LAYERS = trace(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)), torch.empty(2, 1024)).layers
WIDE_RUN = PlannedRun(WIDE_MACHINE, WIDE_LAYERS, 2, BSP(), 64, 4, samples=SampleFacts(1e6, 1e6), epoch_samples=640)
PAIR = make_plan({"0": "column 4 gives part", "2": "row 4 takes part"}).splits


def facts(_: int) -> tuple[LayerFacts, ...]:
    both = tuple(Split(how, size) for how in (COLUMN, ROW) for size in (2, 4))
    up, relu, down = (vars(layer) for layer in WIDE_LAYERS)
    return LayerFacts(**up, splits=both, partner="2"), LayerFacts(**relu), LayerFacts(**down, splits=both)


def chosen(ranks: int) -> tuple[tuple[LayerFacts, ...], None]:
    return facts(ranks), None


def named(splits: Mapping[str, Split]) -> SplitModel:
    return lambda ranks: (facts(ranks), splits)


def given(model: SplitModel, run: PlannedRun = WIDE_RUN) -> SplitInputs:
    return split_inputs(run, inputs_of(run, run.exchange.cost), model(run.ranks)[0])


def split_rows(model: SplitModel, run: PlannedRun = WIDE_RUN) -> dict[tuple[str, int], RunPlan]:
    return {(row.rule, row.nodes): row for row in plan_run(replace(run, split=model), (1, 4))}


def test_the_row_is_that_of_the_predicted_step() -> None:
    rows = split_rows(chosen)
    assert list(rows) == [("bsp", 1), ("bsp", 4), ("bsp + split layers", 4)]
    unsplit, split = rows["bsp", 4], rows["bsp + split layers", 4]
    inputs = given(named(split.split))
    assert split.split == PAIR
    assert split.step - split.loading <= predict_splits(inputs, PAIR).prediction.step * 1.01  # or in better buckets
    assert split.computing == unsplit.computing
    assert split.step * 1.1 < unsplit.step
    assert (split.reading, split.decoding, split.samples) == (unsplit.reading, unsplit.decoding, unsplit.samples)
    assert split.communicating >= sum(
        sent_of(inputs, layer, PAIR.get(layer.name)).activations for layer in inputs.layers
    )
    assert split.rule.removesuffix(WITH_SPLITS) == "bsp"


def test_nothing_is_split_where_links_are_fast() -> None:
    fast = replace(WIDE_MACHINE, link=LinkFacts(1e12), node=NodeFacts(flops=1e12))  # updates would be shorter, too
    assert {rule for rule, _ in split_rows(chosen, replace(WIDE_RUN, machine=fast))} == {"bsp"}


def test_nothing_is_split_where_steps_wait_for_their_samples() -> None:
    """Nor is what the recipe names taken away."""
    node = replace(WIDE_MACHINE.node, cores=4, accelerators=1)
    starved = replace(WIDE_RUN, machine=replace(WIDE_MACHINE, node=node, decoding=DecodingFacts(1e6)))
    assert {rule for rule, _ in split_rows(chosen, starved)} == {"bsp"}
    rows = split_rows(named(PAIR), starved)
    assert rows["bsp + split layers", 4].step == rows["bsp", 4].step


def test_a_rank_has_its_parts_and_keeps_the_inputs_of_its_group() -> None:
    """16 samples on each of 4 ranks; all but biases of 32 MiB of weights."""
    rows = split_rows(named(PAIR))
    unsplit, split = rows["bsp", 4].memory, rows["bsp + split layers", 4].memory
    assert split[:3] == pytest.approx([nbytes / 4 for nbytes in unsplit[:3]])
    assert split.activations - unsplit.activations == 4 * 16 * 4096
    assert split.samples == unsplit.samples
    inputs = given(named(PAIR))
    row = memory_with({"2": Split(ROW, 4)}, unsplit, inputs)
    assert row.activations - unsplit.activations == 16 * 16384
    assert row.weights == pytest.approx(unsplit.weights - 3 / 4 * 4 * 4097 * 1024)


def test_links_have_the_costs_of_the_machine() -> None:
    """Gradients are encoded, activations are not; a byte of an allreduce of 4 ranks is sent 1.5 times."""
    encoded = replace(WIDE_RUN, rule=BSP(Exchange(wire="bfloat16")))
    links, plain = given(named({}), encoded).links, exchange_cost(WIDE_MACHINE, 4, 1).cost
    assert links.network.activations == pytest.approx((plain.latency / 2, plain.per_byte / 1.5))  # half the messages
    assert links.network.gradients.per_byte < 0.6 * links.network.activations.per_byte
    assert links.node.activations == Cost(0.0, 0.0)
    slow = given(named({}), replace(WIDE_RUN, rule=BSP(Exchange("tree")))).links.network
    tree = exchange_cost(WIDE_MACHINE, 4, 1, algorithm="tree").cost
    assert slow.gradients.per_byte == pytest.approx(tree.per_byte / 1.5)
    assert slow.activations == links.network.activations
    assert tree.per_byte > 1.1 * plain.per_byte
    row = CollectiveRow("allreduce", "direct", "float32", 1, 2, 1 << 20, 0.01, 0.0)
    known = replace(WIDE_MACHINE, collectives=(row,))
    measured = given(named({}), replace(WIDE_RUN, machine=known, nodes=2, ranks_per_node=2))
    assert measured.links.node.activations.seconds(1 << 20) == pytest.approx(0.01)


@pytest.mark.parametrize("splits", [{}, {"0": Split(COLUMN, 2)}])
def test_a_sharded_rule_with_split_layers_has_the_costs_of_its_halves(
    splits: Mapping[str, Split], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are not encoded, flags are a third collective; each rank updates as much, and keeps as much for it."""
    monkeypatch.setattr("unisono.plan.run_plan.MAX_PLAYED_RANKS", 2)  # of 4
    run = replace(WIDE_RUN, rule=Sharded(Exchange(wire="bfloat16")))
    inputs, node = given(named({}), run), run.machine.node
    cost, unsharded = run.exchange.cost, exchange_cost(run.machine, 4, 1).cost
    assert cost.latency == pytest.approx(3 / 2 * unsharded.latency, rel=0.02)
    assert inputs.links.network.gradients == pytest.approx((cost.latency, cost.per_byte / 1.5))
    costs = with_splits(inputs, splits).costs
    buckets = with_splits(inputs, splits).buckets(1 << 30, 1)
    costs = replace(costs, layout=replace(costs.layout, buckets=tuple(buckets)))
    updates = (
        task.operation.price(task, costs).seconds
        for task in run.rule(Step(0), 0, costs.layout)
        if task.operation is UPDATE_SHARD
    )
    nbytes = sum(layer.gradient_bytes for layer in WIDE_LAYERS)
    assert sum(updates) == pytest.approx(nbytes / 4 * (3 + 2 * run.kept) / node.memory_bandwidth, rel=1e-3)
    unsplit = rank_memory(run)
    assert memory_with(splits, unsplit, inputs).optimizer == unsplit.optimizer == nbytes / 4


def test_a_wire_is_that_between_nodes_but_for_changes_of_an_anchor() -> None:
    exchange = Exchange(wire="bfloat16")
    rules = BSP(exchange), LocalSGD(exchange)
    runs = [replace(RUN, rule=rule, nodes=nodes, ranks_per_node=2) for rule in rules for nodes in (1, 2)]
    assert [run.wire for run in runs] == [None, "bfloat16", "bfloat16", "bfloat16"]


def test_weights_that_are_not_trained_are_not_exchanged() -> None:
    model = nn.Sequential(nn.Linear(400, 4000), nn.Linear(4000, 1))
    model[0].requires_grad_(False)
    slow = replace(MACHINE, link=replace(MACHINE.link, latency=1e-3))
    (row,) = plan_run(on(slow, layers=trace(model, torch.empty(2, 400)).layers), (4,))
    assert row.bottleneck.startswith("communication, by latency: "), row.bottleneck


def test_groups_of_several_sizes_are_planned() -> None:
    splits = {"0": Split(COLUMN, 4), "2": Split(ROW, 2)}
    row = split_rows(named(splits))["bsp + split layers", 4]
    assert row.split == splits
    assert row.memory.weights == pytest.approx(4 * (4097 * 1024 / 2 + 1025 * 4096 / 4))
