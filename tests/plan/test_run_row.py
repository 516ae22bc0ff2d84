"""Row of a plan: the worked example, and an interval that is never below what must be done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.bottleneck import StepShares
from unisono.plan.exchange_cost import FREE
from unisono.plan.loading import Loading
from unisono.plan.machines import MachineFacts
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_row import PlannedStep, RunPlan, row_of
from unisono.plan.run_settings import RunSettings
from unisono.rules import BSP
from unisono.step.costs import Cost

SETTINGS = RunSettings(64, (4,), {"bsp": BSP()}, traced=2, epoch_samples=640)
MEMORY = RankMemory(1e9, 1e9, 1e9, 0.0, 2e9)


def row(shares: StepShares, alone: float = 0.1) -> RunPlan:
    step = PlannedStep("bsp", shares, MEMORY, 1e6, "chain", 8 << 20, "direct", None)
    return row_of(MachineFacts("example"), SETTINGS, 4, step, alone)


def test_the_worked_example() -> None:
    shares = StepShares(0.025, 0.025, 0.0, 0.03, Cost(0.0, 1e-9))
    found = row(shares)
    assert (found.step, found.low, found.high) == pytest.approx((0.05, 0.0476, 0.0524))
    assert (found.speedup, found.efficiency, found.epoch) == pytest.approx((2, 0.5, 0.5))
    late = row(shares._replace(samples=Loading(0.0, 0.052)))
    assert (late.step, late.low, late.high, late.loading) == pytest.approx((0.052, 0.052, 0.0524, 0.002))
    assert (late.samples, late.wire) == (16, "float32")


seconds = st.floats(1e-6, 1.0)


@given(seconds, seconds, seconds, seconds, seconds, seconds)
def test_a_step_is_inside_its_interval_and_never_below_its_parts(
    computing: float, communication: float, update: float, read: float, decode: float, turn: float
) -> None:
    shares = StepShares(computing, communication, update, communication, Cost(0, 1), Loading(read, decode, turn))
    found = row(shares)
    assert found.low <= found.step * (1 + 1e-9)
    assert found.step <= found.high * (1 + 1e-9)
    assert found.low >= max(computing + update + turn, read, decode)
    free = row(shares._replace(communication=0.0, cost=FREE))
    assert free.low == free.high == pytest.approx(free.step)


def test_ranks_of_a_node_share_its_memory() -> None:
    machine, shares = MachineFacts("example"), StepShares(0.1, 0.0, 0.0, 0.0, FREE)
    step = PlannedStep("bsp", shares, MEMORY, 1e6, "none", 8 << 20, "", None)
    small = replace(machine, node=replace(machine.node, memory_bytes=8e9))
    assert row_of(small, SETTINGS, 4, step, 0.1).bottleneck.startswith("computing")
    two = replace(SETTINGS, ranks_per_node=2)
    assert row_of(small, two, 4, step, 0.1).bottleneck == "memory: a rank needs 5 GB of 4 GB"


def test_a_slow_node_is_named_before_the_bottleneck() -> None:
    step = PlannedStep("bsp", StepShares(0.1, 0.0, 0.0, 0.0, FREE), MEMORY, 1e6, "none", 8 << 20, "", None)
    named = row_of(MachineFacts("example"), SETTINGS, 4, step._replace(slower="node 3 is slow", estimated="tree"), 0.1)
    assert named.bottleneck == f"node 3 is slow; {row(step.shares).bottleneck}"
    assert (named.estimated, row(step.shares).estimated) == ("tree", "")
