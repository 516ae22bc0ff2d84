"""Planned runs as a table, and as JSON of a fixed form."""

from __future__ import annotations

import json
from dataclasses import replace

from unisono.plan.loading import SampleFacts, unknown_rates
from unisono.plan.machines import EfficiencyFacts, LinkFacts, MachineFacts, NodeFacts
from unisono.plan.measured_rows import NetworkRow
from unisono.plan.planned_run import PlannedRun
from unisono.plan.rank_memory import RankMemory
from unisono.plan.run_report import as_data, as_lines, worthwhile
from unisono.plan.run_row import RunPlan
from unisono.plan.trace import TracedLayer
from unisono.rules import BSP

MACHINE = MachineFacts("example", NodeFacts(flops=1e12), link=LinkFacts(1e9), assumed={"link.bandwidth": "a guess"})

RUN = PlannedRun(MACHINE, [], 2, BSP(), 64)

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
    head, first, second, *below = as_lines([ALONE, FOUR], RUN, 0.5)
    assert head.split() == [
        *("rule", "nodes", "step", "from", "-", "to", "computing", "communication", "update", "speedup", "efficiency"),
        *("epoch", "memory", "overlap", "buckets", "schedule", "wire"),
    ]
    assert first.split()[:4] == ["bsp", "1", "100.0", "ms"]
    assert second.split()[2:14] == ["50.0", "ms", "45.0", "ms", "-", "60.0", "ms", "25.0", "ms", "20.0", "ms", "5.0"]
    assert second.split()[-9:] == ["3", "s", "5", "GB", "chain", "8", "MiB", "direct", "float32"]
    text = "\n".join(below)
    for words in ("bsp, 1 node: computing: 100%", "up to 1, where", "no node.memory_bandwidth", "a guess", "4.8%"):
        assert words in text


def test_a_line_says_what_the_cost_of_exchanges_is_based_on() -> None:
    plans = [ALONE, replace(FOUR, nodes=2, basis="measured"), replace(FOUR, basis="corrected")]
    plans.append(replace(FOUR, nodes=8, rule="sharded", basis="corrected"))
    (line,) = [line for line in as_lines(plans, RUN, 0.5) if line.startswith("exchanges: ")]
    assert line == (
        "exchanges: measured on 2 nodes; estimated from the link, times what was measured over its own estimate on "
        "4, 8 nodes"
    )
    assert not any("exchanges" in line for line in as_lines([ALONE], RUN, 0.5))


def test_a_line_has_the_wall_time_of_each_row() -> None:
    layer = TracedLayer("0", "Linear", forward_flops=1, backward_flops=1, parameter_bytes=100_000_000)
    run = replace(RUN, layers=[layer], epoch_samples=3840, test_samples=640, epochs=100)
    (line,) = [line for line in as_lines([ALONE, FOUR], run, 0.5) if line.startswith("wall time")]
    assert line == ("wall time for sbatch --time, 100 epochs: 0-00:15:00 (bsp, 1 node), 0-00:10:00 (bsp, 4 nodes)")
    job = as_data([FOUR], run, 0.5)["rows"][0]["job"]
    assert job["time"] == "0-00:10:00"
    assert job["total"] == sum(job[part] for part in ("start", "pack", "tuning", "steps", "tests", "checkpoints"))
    assert any("without the samples of an epoch" in line for line in as_lines([ALONE], RUN, 0.5))


def test_the_form_of_json() -> None:
    machine = replace(MACHINE, efficiency=EfficiencyFacts(0.9, 0.7))
    data = json.loads(json.dumps(as_data([ALONE, FOUR], replace(RUN, machine=machine), 0.25)))
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
                **{key: getattr(one, key) for key in ("wire", "loading", "reading", "decoding", "split")},
                "job": None,
                "efficiency": one.speedup / one.nodes,
                "memory": {
                    "weights": 1e9,
                    "gradients": 1e9,
                    "optimizer": 1e9,
                    "anchor": 0.0,
                    "activations": 2e9,
                    "samples": 0.0,
                    "total": 5e9,
                },
            }
            for one in (ALONE, FOUR)
        ],
        "least_marginal_efficiency": 0.25,
        "worthwhile_nodes": {"bsp": 4},
        "notes": unknown_rates(machine, RUN.samples),
    }


def test_each_rule_has_its_own_last_worthwhile_number() -> None:
    other = [replace(FOUR, rule="sharded", speedup=3.9)]
    assert worthwhile([ALONE, FOUR, *other], 0.5) == {"bsp": 1, "sharded": 4}


def test_a_starved_run_has_a_column_for_loading_and_notes_are_lines() -> None:
    starved = replace(FOUR, loading=0.01, decoding=0.06)
    head, _, second, *below = as_lines([ALONE, starved], replace(RUN, samples=SampleFacts(pixels=9)), 0.5)
    assert head.split()[6:10] == ["computing", "communication", "update", "loading"]
    assert "60.0 ms" in second
    assert "10.0 ms" in second
    assert "decoding takes no time here: the machine file has no decoding.pixels" in below


def test_split_layers_have_a_line_and_count_beside_the_rule_without_them() -> None:
    split = replace(FOUR, rule="bsp + split layers", speedup=3.9, split={"fc": "column 4", "out": "row 4"})
    text = "\n".join(as_lines([ALONE, FOUR, split], RUN, 0.5))
    assert "bsp + split layers, 4 nodes: fc: column 4, out: row 4; all other layers data parallel" in text
    two = replace(FOUR, nodes=2, speedup=1.9)
    assert worthwhile([ALONE, two, FOUR, split], 0.5) == {"bsp": 2, "bsp + split layers": 4}
    assert worthwhile([ALONE, replace(two, speedup=1.2), split], 0.5) == {"bsp": 1, "bsp + split layers": 1}


def test_a_short_epoch_keeps_its_digits() -> None:
    lines = list(as_lines([replace(ALONE, epoch=0.0123), replace(FOUR, epoch=1234.5)], RUN, 0.5))
    assert " 0.012 s " in lines[1]
    assert " 1,234 s " in lines[2]


def test_computing_at_the_peak_or_at_a_measured_rate_is_said() -> None:
    words = "computing at 100% of the peak: no efficiency is known"
    bare = list(as_lines([ALONE], RUN, 0.5))
    assert bare[-3:] == [
        "assumed, link.bandwidth: a guess",
        f"assumed, efficiency.convolution: {words}",
        f"assumed, efficiency.linear: {words}",
    ]
    assert as_data([ALONE], RUN, 0.5)["assumed"]["efficiency.linear"] == words
    measured = replace(MACHINE, networks=(NetworkRow("net", 32, 9.5),))
    assert list(as_lines([ALONE], replace(RUN, machine=measured), 0.5))[-2:] == [
        "computing: 9.5 samples/s of a node, as the machine file has them for net, 32 a step",
        "assumed, link.bandwidth: a guess",
    ]
