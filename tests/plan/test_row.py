"""Row of a plan: the worked example, and an interval that is never below what must be done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.test_run_report import FOUR

from unisono.plan.choose import PredictionInputs, Setting, predicted
from unisono.plan.loading import SampleFacts
from unisono.plan.machines import DecodingFacts, DiskFacts, LinkFacts, MachineFacts, NodeFacts
from unisono.plan.planned_run import PlannedRun, RankMemory
from unisono.plan.run_plan import RunPlan, bottleneck, epoch_seconds, lacking_memory, row_of, slow_link
from unisono.rules import BSP
from unisono.step.costs import Computing, Cost, Costs
from unisono.step.layout import Bucket, Layout

RULE = BSP(overlap="none")
RUN = PlannedRun(MachineFacts("example", link=LinkFacts(1e9)), [], 2, RULE, 64, 4, epoch_samples=640)
MEMORY = RankMemory(1e9, 1e9, 1e9, 0.0, 2e9)


def row(computing: float, communication: float, update: float = 0.0, run: PlannedRun = RUN) -> RunPlan:
    """Return the row of a step whose one bucket is exchanged, and then updated, once all is computed."""
    of_step = Computing((0.0,), (computing,), computing, update)
    costs = Costs(Layout(4, 1, ()), of_step, Cost(0.0, communication))
    inputs = PredictionInputs(RULE, costs, lambda *_: [Bucket(1, (0,))])
    return row_of(run, inputs, predicted(inputs, Setting("none", 8 << 20)), MEMORY, 1e6, 0.1)


def loading(read: float, decode: float, in_turn: bool = False) -> PlannedRun:
    """Return the run whose 16 samples of a node are read and decoded in these seconds."""
    node = NodeFacts(cores=1, accelerators=0 if in_turn else 1)
    machine = replace(RUN.machine, node=node, disk=DiskFacts(16 / read), decoding=DecodingFacts(16 / decode))
    return replace(RUN, machine=machine, samples=SampleFacts(1.0, 1.0, from_disk=True))


def test_the_worked_example() -> None:
    planned = row(0.025, 0.025)
    assert (planned.step, planned.low, planned.high) == pytest.approx((0.05, 0.0476, 0.0524))
    assert (planned.speedup, planned.efficiency, planned.epoch) == pytest.approx((2, 0.5, 0.5))
    late = row(0.025, 0.025, run=loading(1e-9, 0.052))
    assert (late.step, late.low, late.high, late.loading) == pytest.approx((0.052, 0.052, 0.0524, 0.002))
    assert (late.samples, late.wire) == (16, "float32")


seconds = st.floats(1e-6, 1.0)


@given(seconds, seconds, seconds, seconds, seconds, st.booleans())
def test_a_step_is_inside_its_interval_and_never_below_its_parts(
    computing: float, communication: float, update: float, read: float, decode: float, in_turn: bool
) -> None:
    run = loading(read, decode, in_turn)
    planned = row(computing, communication, update, run)
    assert planned.low <= planned.step * (1 + 1e-9)
    assert planned.step <= planned.high * (1 + 1e-9)
    least = max(computing + update + in_turn * decode, read, decode)
    assert planned.low >= least * (1 - 1e-9)
    free = row(computing, 0.0, update, run)
    assert free.low == free.high == pytest.approx(free.step)


def test_ranks_of_a_node_share_its_memory() -> None:
    small = replace(RUN, machine=replace(RUN.machine, node=NodeFacts(memory_bytes=8e9)))
    assert row(0.1, 0.0, run=small).bottleneck.startswith("computing")
    two = replace(small, ranks_per_node=2)
    assert row(0.1, 0.0, run=two).bottleneck == "memory: a rank needs 5 GB of 4 GB"


def of_parts(computing: float, communication: float, update: float, communicating: float) -> RunPlan:
    parts = {"computing": computing, "communication": communication, "update": update}
    return replace(FOUR, **parts, communicating=communicating, memory=RankMemory(2.0, 0.0, 0.0, 0.0, 0.0))


COMPUTING, COMMUNICATION, UPDATE = (
    of_parts(1.0, 0.0, 0.0, 0.0),
    of_parts(1.0, 3.0, 0.0, 4.0),
    of_parts(1.0, 0.0, 3.0, 0.0),
)


@pytest.mark.parametrize(
    ("plan", "links", "expected"),
    [
        (of_parts(9.0, 1.0, 0.0, 3.0), 2.0, "computing: 90% of the step; 2e+03 ms of communication are hidden"),
        (of_parts(9.0, 1.0, 0.0, 1.0 - 1e-15), 0.0, "computing: 90% of the step\n"),
        (COMPUTING, 0.0, "computing: 100% of the step"),
        (COMMUNICATION, 3.0, "communication, by bandwidth: 75% of the step"),
        (COMMUNICATION, 1.0, "communication, by latency: 75% of the step"),
        (UPDATE, 0.0, "updates: 75% of the step"),
        (replace(UPDATE, memory=RankMemory(2e10, 0, 0, 0, 0)), 0.0, "memory: a rank needs 20 GB of 10 GB"),
        (
            replace(UPDATE, memory=RankMemory(1e9, 0, 0, 0, 0, gathered=1.9e10)),
            0.0,
            "memory: rank 0 needs 20 GB of 10 GB; 19 GB are states of all ranks, gathered for a checkpoint",
        ),
        (  # two ranks on a node of 20 GB, of which the other one needs 1 GB
            replace(UPDATE, ranks=8, memory=RankMemory(1e9, 0, 0, 0, 0, gathered=1.9e10)),
            0.0,
            "memory: rank 0 needs 20 GB of 19 GB; 19 GB are",
        ),
        (
            replace(COMPUTING, loading=2.0, reading=0.1, decoding=3.0),
            0.0,
            "starved: decoding takes 3e+03 ms, a step without it 1e+03 ms: more cores",
        ),
        (replace(COMPUTING, loading=2.0, reading=3.0, decoding=0.1), 0.0, "starved: reading takes 3e+03 ms"),
        (replace(COMPUTING, loading=2.0, decoding=2.0), 0.0, "decoding: 67% of the step, on the cores"),
        (replace(COMPUTING, loading=0.5, decoding=0.5), 0.0, "computing: 67% of the step"),
        (replace(COMMUNICATION, decoding=2.0), 3.0, "communication, by bandwidth"),
    ],
)
def test_the_bottleneck(plan: RunPlan, links: float, expected: str) -> None:
    node = NodeFacts(memory_bytes=1e10 * plan.ranks / plan.nodes)
    assert f"{bottleneck(plan, links, node)}\n".startswith(expected)


@pytest.mark.parametrize(
    ("ranks", "needs"),
    [(1, 4.5), (2, 6), (4, 9), (8, 18)],  # 3 GB of weights, gradients, optimizer; 6 of outputs; anchor on the host
)
def test_an_accelerator_has_its_share_of_outputs_and_the_state_of_its_ranks(ranks: int, needs: float) -> None:
    plan = replace(COMPUTING, nodes=1, ranks=ranks, memory=RankMemory(1e9, 1e9, 1e9, 5e8, 6e9))
    for size, host, expected in (
        (0, 0, ""),
        (needs * 1e9, 1.5e9 * ranks, ""),
        (needs * 1e9 - 1e6, 0, f"memory: an accelerator needs {needs:g} GB of "),
        (needs * 1e9, 1.4e9 * ranks, "memory: a rank needs 1.5 GB of 1.4 GB"),
    ):
        node = NodeFacts(accelerators=4, device_memory_bytes=size, memory_bytes=host)
        assert lacking_memory(plan, node).startswith(expected)
        assert bool(lacking_memory(plan, node)) == bool(expected)


def test_the_slowest_link_is_named_where_it_costs_something() -> None:
    assert slow_link({3: 4.0, 5: 6.0}, 1.0, 0.9).startswith("node 5's link (the slowest of 2), 6 times slower: 100 ms")
    assert slow_link({3: 4.0}, 1.0, 0.999) == ""


def test_a_last_smaller_minibatch_is_a_step() -> None:
    assert epoch_seconds(1000, 256, 0.5) == 2.0
    assert epoch_seconds(1024, 256, 0.5) == 2.0
    assert epoch_seconds(1025, 256, 0.5) == 2.5
