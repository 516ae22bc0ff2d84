"""Planned runs as a table, as JSON of a fixed form, and as a wall time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from unisono.errors import UsageError
from unisono.plan.machines import LinkFacts, MachineFacts, NodeFacts
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_plan import RunPlan
from unisono.plan.run_report import as_data, as_lines, wall_time, worthwhile

MACHINE = MachineFacts("example", NodeFacts(flops=1e12), link=LinkFacts(1e9), assumed={"link.bandwidth": "a guess"})

ALONE = RunPlan(
    rule="bsp",
    nodes=1,
    ranks=1,
    samples=64,
    overlap="none",
    bucket_bytes=8 << 20,
    schedule="",
    computing=0.1,
    communication=0.0,
    update=0.0,
    communicating=0.0,
    low=0.1,
    high=0.1,
    speedup=1.0,
    memory=RankMemory(1e9, 1e9, 1e9, 0.0, 2e9),
    bottleneck="computing: 100% of the step",
    epoch=6.0,
)
FOUR = replace(
    ALONE,
    nodes=4,
    ranks=4,
    samples=16,
    overlap="chain",
    schedule="direct",
    computing=0.025,
    communication=0.02,
    update=0.005,
    communicating=0.03,
    low=0.045,
    high=0.06,
    speedup=2.0,
    epoch=3.0,
)


def test_the_table_has_the_parts_of_the_step_and_says_what_is_assumed() -> None:
    head, first, second, *below = as_lines([ALONE, FOUR], MACHINE, 0.5)
    assert head.split() == [
        *("rule", "nodes", "step", "from", "-", "to", "computing", "communication", "update", "speedup", "efficiency"),
        *("epoch", "memory", "overlap", "buckets", "schedule"),
    ]
    assert first.split()[:4] == ["bsp", "1", "100.0", "ms"]
    assert second.split()[2:14] == ["50.0", "ms", "45.0", "ms", "-", "60.0", "ms", "25.0", "ms", "20.0", "ms", "5.0"]
    assert second.split()[-7:] == ["3", "s", "5", "GB", "chain", "8", "MiB", "direct"][1:]
    text = "\n".join(below)
    for words in ("bsp, 1 node: computing: 100%", "up to 1, where", "no node.memory_bandwidth", "a guess", "7.5%"):
        assert words in text


def test_a_line_says_what_the_cost_of_exchanges_is_based_on() -> None:
    plans = [ALONE, replace(FOUR, nodes=2, basis="measured"), replace(FOUR, basis="corrected")]
    plans.append(replace(FOUR, nodes=8, rule="sharded", basis="corrected"))
    (line,) = [line for line in as_lines(plans, MACHINE, 0.5) if line.startswith("exchanges: ")]
    assert line == (
        "exchanges: measured on 2 nodes; estimated from the link, times what was measured over its own estimate on "
        "4, 8 nodes"
    )
    assert not any("exchanges" in line for line in as_lines([ALONE], MACHINE, 0.5))


def test_the_form_of_json() -> None:
    data = json.loads(json.dumps(as_data([ALONE, FOUR], MACHINE, 0.25)))
    assert data == {
        "machine": "example",
        "assumed": {"link.bandwidth": "a guess"},
        "rows": [
            {
                **{key: getattr(one, key) for key in ("rule", "nodes", "ranks", "samples", "overlap", "bucket_bytes")},
                **{
                    key: getattr(one, key)
                    for key in ("schedule", "basis", "computing", "communication", "update", "epoch")
                },
                **{key: getattr(one, key) for key in ("communicating", "low", "high", "speedup", "bottleneck", "step")},
                "efficiency": one.speedup / one.nodes,
                "memory": {
                    "weights": 1e9,
                    "gradients": 1e9,
                    "optimizer": 1e9,
                    "anchor": 0.0,
                    "activations": 2e9,
                    "total": 5e9,
                },
            }
            for one in (ALONE, FOUR)
        ],
        "least_marginal_efficiency": 0.25,
        "worthwhile_nodes": {"bsp": 4},
    }


def test_each_rule_has_its_own_last_worthwhile_number() -> None:
    other = [replace(FOUR, rule="sharded", speedup=3.9)]
    assert worthwhile([ALONE, FOUR, *other], 0.5) == {"bsp": 1, "sharded": 4}


@pytest.mark.parametrize(
    ("epochs", "expected"), [(1, "0-00:01:00"), (100, "0-00:06:00"), (1000, "0-01:00:00"), (30_000, "1-06:00:00")]
)
def test_wall_time_is_that_of_the_slow_end(epochs: int, expected: str) -> None:
    assert wall_time([FOUR], epochs, 64, 3840) == expected  # 60 steps of 60 ms


def test_wall_time_needs_one_plan_and_the_samples() -> None:
    for plans, samples in (([ALONE, FOUR], 3840), ([FOUR], None)):
        with pytest.raises(UsageError, match="--time is that of one rule on one number of nodes, with --epoch-samples"):
            wall_time(plans, 1, 64, samples)
