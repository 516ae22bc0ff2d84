"""Planned runs as a table, and as JSON of a fixed form, also before and after a change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.plan.test_run_plan import WIDE_RUN, named
from tests.plan.test_split import SLOW, cd_dnn, inputs, layer_of

from unisono.compute.convolution_plan import AUTOTUNE_REPETITIONS
from unisono.plan.choose import BUCKET_VARIANTS, overlaps_of
from unisono.plan.layer_plan import make_plan
from unisono.plan.loading import SampleFacts, unknown_rates
from unisono.plan.machines import DiskFacts, EfficiencyFacts, LinkFacts, MachineFacts, NetworkRow, NodeFacts, ProductRow
from unisono.plan.planned_run import PlannedRun, RankMemory
from unisono.plan.run_plan import RunPlan
from unisono.plan.run_report import (
    AUTOTUNE_CALLS,
    DISK_BANDWIDTH,
    as_data,
    as_lines,
    changed_rules,
    compare,
    comparison_data,
    comparison_lines,
    job_seconds,
    last_worthwhile,
    layer_lines,
    layers_of,
    planned_layers,
    slurm_time,
    worthwhile,
)
from unisono.plan.split import choose_splits, sent_of
from unisono.plan.trace import TracedLayer
from unisono.plan.trials import LEAST_TRIAL_STEPS, MEASURED_STEPS, MOST_TRIAL_STEPS, TRIALS
from unisono.rules import BSP, LocalSGD

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
    assert second.split()[2:14] == ["50.0", "ms", "45.0", "ms", "-", "60.0", "ms", "25.0", "ms", "20.0", "ms", "5"]
    assert second.split()[-9:] == ["3", "s", "5", "GB", "chain", "8", "MiB", "direct", "float32"]
    text = "\n".join(below)
    for phrase in ("bsp, 1 node: computing: 100%", "up to 1: so far", "no node.memory_bandwidth", "a guess", "4.8%"):
        assert phrase in text


def test_a_line_says_what_the_cost_of_exchanges_is_based_on() -> None:
    plans = [ALONE, replace(FOUR, nodes=2, basis="measured"), replace(FOUR, basis="corrected")]
    plans.append(replace(FOUR, nodes=8, rule="sharded", basis="corrected"))
    (line,) = [line for line in as_lines(plans, RUN, 0.5) if line.startswith("exchanges: ")]
    assert line == (
        "exchanges: measured on 2 nodes; estimated from the link, times what was measured over its own estimate on "
        "4, 8 nodes"
    )
    assert not any("exchanges" in line for line in as_lines([ALONE], RUN, 0.5))


def test_a_line_says_that_the_memory_of_accelerators_is_not_known() -> None:
    unknown, p100 = NodeFacts(accelerators=4), NodeFacts(accelerators=4, device_memory_bytes=16e9)
    for node, said in ((NodeFacts(), 0), (unknown, 1), (p100, 0)):
        lines = as_lines([ALONE], replace(RUN, machine=replace(MACHINE, node=node)), 0.5)
        assert sum(line.startswith("memory of accelerators is not known") for line in lines) == said


def test_a_line_has_the_wall_time_of_each_row() -> None:
    layer = TracedLayer("0", "Linear", forward_flops=1, backward_flops=1, parameter_bytes=10**8, gradient_bytes=10**8)
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
                **{key: getattr(row, key) for key in ("rule", "nodes", "ranks", "samples", "overlap", "bucket_bytes")},
                **{
                    key: getattr(row, key)
                    for key in ("schedule", "basis", "computing", "communication", "update", "epoch")
                },
                **{key: getattr(row, key) for key in ("communicating", "low", "high", "speedup", "bottleneck", "step")},
                **{key: getattr(row, key) for key in ("wire", "loading", "reading", "decoding", "split")},
                "job": None,
                "efficiency": row.speedup / row.nodes,
                "memory": {
                    "weights": 1e9,
                    "gradients": 1e9,
                    "optimizer": 1e9,
                    "anchor": 0.0,
                    "activations": 2e9,
                    "samples": 0.0,
                    "outer": 0.0,
                    "gathered": 0.0,
                    "total": 5e9,
                },
            }
            for row in (ALONE, FOUR)
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
    splits = {"fc": "column 4", "out": "row 4"}
    split = replace(FOUR, rule="bsp + split layers", speedup=3.9, split=make_plan(splits).splits)
    text = "\n".join(as_lines([ALONE, FOUR, split], RUN, 0.5))
    assert as_data([split], RUN, 0.5)["rows"][0]["split"] == splits
    assert "bsp + split layers, 4 nodes: fc: column 4, out: row 4; all other layers data parallel" in text
    two = replace(FOUR, nodes=2, speedup=1.9)
    assert worthwhile([ALONE, two, FOUR, split], 0.5) == {"bsp": 2, "bsp + split layers": 4}
    assert worthwhile([ALONE, replace(two, speedup=1.2), split], 0.5) == {"bsp": 1, "bsp + split layers": 1}


def test_a_short_epoch_keeps_its_digits() -> None:
    lines = list(as_lines([replace(ALONE, epoch=0.0123), replace(FOUR, epoch=1234.5)], RUN, 0.5))
    assert " 0.012 s " in lines[1]
    assert " 1,234 s " in lines[2]


def test_computing_at_the_peak_or_at_a_measured_rate_is_said() -> None:
    assumption = "computing at 100% of the peak: no efficiency is known"
    bare = list(as_lines([ALONE], RUN, 0.5))
    assert bare[-3:] == [
        "assumed, link.bandwidth: a guess",
        f"assumed, efficiency.convolution: {assumption}",
        f"assumed, efficiency.linear: {assumption}",
    ]
    assert as_data([ALONE], RUN, 0.5)["assumed"]["efficiency.linear"] == assumption
    measured = replace(MACHINE, networks=(NetworkRow("net", 32, 9.5),))
    assert list(as_lines([ALONE], replace(RUN, machine=measured), 0.5))[-2:] == [
        "computing: 9.5 samples/s of a node, as the machine file has them for net, 32 a step",
        "assumed, link.bandwidth: a guess",
    ]


def test_the_last_worthwhile_number_is_before_the_first_that_adds_too_little() -> None:
    speedups = [(1, 1.0), (2, 2.0), (4, 2.9), (8, 6.9)]
    assert last_worthwhile(speedups, 0.5) == 2
    assert last_worthwhile(speedups, 0.4) == 8
    assert last_worthwhile(speedups[:1], 0.5) == 1


FASTER = replace(FOUR, communication=0.005, low=0.03, high=0.04, speedup=0.1 / 0.035)


def test_a_row_is_compared_with_that_of_its_rule_and_nodes() -> None:
    first, second = compare([ALONE, FOUR], [ALONE, FASTER], "bandwidth=2x")
    assert (first.before, first.after, first.ratio) == (ALONE, ALONE, 1)
    assert (second.before, second.after) == (FOUR, FASTER)
    assert second.ratio == pytest.approx(0.7)
    assert second.differences == pytest.approx({"computing": 0, "communication": -0.015, "update": 0, "loading": 0})


def test_a_rule_that_is_gone_is_compared_with_the_new_one() -> None:
    local = replace(FASTER, rule="local_sgd:16")
    rows = compare([ALONE, FOUR, replace(FOUR, rule="sharded")], [local], "rule=local_sgd:16")
    assert [(row.before.rule, row.after.rule) for row in rows] == [("bsp", local.rule), ("sharded", local.rule)]


def test_a_row_whose_rule_is_gone_on_its_nodes_alone_is_compared_with_all_there() -> None:
    split, four, eight = replace(FOUR, rule="bsp + split layers"), replace(FASTER, nodes=4), replace(FASTER, nodes=8)
    rows = compare([FOUR, split], [four, eight, replace(eight, rule=split.rule)], "latency=2x")
    assert [(row.before.rule, row.after) for row in rows] == [("bsp", four), (split.rule, four)]


def test_a_row_that_only_one_side_has_is_left_out() -> None:
    split = replace(FOUR, rule="bsp + split layers")
    assert [row.before.rule for row in compare([FOUR], [FASTER, split], "latency=2x")] == ["bsp"]


def test_lines_have_before_and_after_and_what_changed() -> None:
    left_out, head, line = comparison_lines(compare([ALONE, FOUR], [ALONE, FASTER], "bandwidth=2x"))
    assert left_out == "what if: steps that change by less than 0.5%, left out: 1"
    assert head.split()[:6] == ["what", "if", "rule", "nodes", "step", "then"]
    for phrase in ("bandwidth=2x", "50.0 ms", "35.0 ms", "-30%", "communication -15.0 ms", " 2.857"):
        assert phrase in line
    assert list(comparison_lines(compare([ALONE], [ALONE], "x")))[1:] == []


def test_a_chart_has_the_rules_that_change() -> None:
    sharded = replace(FOUR, rule="sharded")
    rows = changed_rules([ALONE, FOUR, sharded], [ALONE, FASTER, sharded], "bandwidth=2x")
    assert [(row.rule, row.step) for row in rows] == [
        ("bsp, bandwidth=2x", ALONE.step),
        ("bsp, bandwidth=2x", FASTER.step),
    ]


def test_the_form_of_json_of_a_change() -> None:
    (row,) = comparison_data(compare([FOUR], [FASTER], "bandwidth=2x"))
    assert (row["step"], row["step_then"]) == pytest.approx((0.05, 0.035))
    assert set(row) == {
        *("change", "nodes", "rule", "rule_then", "step", "step_then", "ratio", "differences"),
        *("speedup", "speedup_then", "bottleneck_then"),
    }


INPUTS = inputs([*cd_dnn(256), (layer_of("relu"), 0.0), (layer_of("norm", 64), 0.0)], 256, SLOW)
SPLITS = choose_splits(INPUTS).splits
TRACED = [
    *(TracedLayer(f"{at}", "Linear", forward_flops=100, backward_flops=200, parameters=9) for at in range(8)),
    TracedLayer("relu", "ReLU"),
    TracedLayer("norm", "LayerNorm", parameters=16),
]
LAYERS_RUN = PlannedRun(MachineFacts("example", NodeFacts(flops=1e12)), TRACED, 1, BSP(), 256)
ROWS = planned_layers(LAYERS_RUN, INPUTS, SPLITS)


def test_rows_have_the_parts_of_the_splits() -> None:
    assert [row.name for row in ROWS] == [*map(str, range(8)), "norm"]  # a relu computes nothing that counts
    assert sum(row.computing for row in ROWS) == pytest.approx(INPUTS.step.costs.computing.whole)
    assert ROWS[0].flops == 300 * 256  # they were traced for one sample
    assert make_plan({row.name: row.parallelism for row in ROWS if row.parallelism != "data"}).splits == SPLITS
    sent = sent_of(INPUTS, INPUTS.layers[1], SPLITS["1"])
    assert ROWS[1][6:9] == (sent.gradients, sent.activations, sent.nbytes)


def product(rows: int, inner: int, columns: int, forward: float, backward: float) -> ProductRow:
    return ProductRow("linear", rows, inner, columns, 1, forward, backward, 0.0)


MEASURED = replace(
    WIDE_RUN,
    split=named({}),
    machine=replace(
        WIDE_RUN.machine,
        products=(
            *(product(2, *sizes, 1e9, 1e9) for sizes in ((1024, 4096), (4096, 1024))),
            product(16, 1024, 4096, 4e11, 2e11),
            product(16, 4096, 1024, 4e11, 1e11),
        ),
    ),
)
"""A rank has 16 samples, whose rates are those of no product of 2, for which the layers were traced."""


def test_layers_compute_at_the_rates_of_a_ranks_samples_and_of_each_pass() -> None:
    for row, layer, backward in zip(layers_of(MEASURED, {}), WIDE_RUN.layers[::2], (2e11, 1e11), strict=True):
        assert row.computing == pytest.approx(8 * (layer.forward_flops / 4e11 + layer.backward_flops / backward))


def test_a_test_computes_at_the_rate_of_a_forward_pass_of_a_ranks_samples() -> None:
    flops = sum(layer.forward_flops for layer in WIDE_RUN.layers) / 2
    job = job_seconds(replace(MEASURED, test_samples=64), FOUR)
    assert job.tests == pytest.approx(16 * flops / 4e11)


def test_the_lines_are_a_table() -> None:
    head, *rest, norm = layer_lines(ROWS)
    assert head.split()[:5] == ["layer", "kind", "GFLOP", "weights", "parallelism"]
    assert "column 4 gives part" in "\n".join(rest)
    assert norm.split()[-2:] == ["9.6e-05", "MB"]


LAYERS = [
    TracedLayer(
        "0",
        "Linear",
        forward_flops=625_000_000,
        backward_flops=1,
        parameter_bytes=100_000_000,
        gradient_bytes=100_000_000,
    )
]
"""A forward pass of 2 samples takes 0.625 ms, of 16 samples 5 ms."""

JOB = PlannedRun(MACHINE, LAYERS, 2, BSP(), 64, 4, epoch_samples=3840, test_samples=640, epochs=100)
NOT_SEARCHED = replace(JOB, rule=LocalSGD(every=4))


def test_the_worked_example_of_wall_time() -> None:
    job = job_seconds(JOB, FOUR)
    assert job == pytest.approx((20, 0, 0.3125, 339, 5, 200))
    assert job.total == pytest.approx(564.3125)
    assert slurm_time(job.total) == "0-00:10:00"


def test_nothing_is_tuned_on_one_rank_or_where_nothing_is_searched() -> None:
    assert job_seconds(JOB, replace(FOUR, ranks=1)).tuning == job_seconds(NOT_SEARCHED, FOUR).tuning == 0
    assert job_seconds(replace(NOT_SEARCHED, autotunes=True), FOUR).tuning == AUTOTUNE_CALLS * FOUR.computing


def test_samples_are_read_once_and_decoded_in_tests() -> None:
    machine = replace(MACHINE, disk=DiskFacts(1e6))
    run = replace(JOB, machine=machine, samples=SampleFacts(nbytes=1000), ranks_per_node=2)
    job = job_seconds(run, replace(FOUR, ranks=8, samples=8, decoding=0.08))
    assert job.pack == pytest.approx(3840 * 1000 / 4 / 1e6)
    assert job.checkpoints == pytest.approx(100 * 200e6 / 1e6)
    assert job.tests == pytest.approx(100 * 80 * (2 * 0.3125e-3 + 0.01))


def test_checkpoints_within_an_epoch_count() -> None:
    each = 200e6 / DISK_BANDWIDTH
    for every, count in ((0, 1), (59, 2), (60, 1), (20, 3), (1, 60)):
        run = replace(JOB, epochs=1, checkpoint_every=every)
        assert job_seconds(run, FOUR).checkpoints == pytest.approx(count * each)


def test_checkpoints_by_the_clock_count() -> None:
    by_clock = replace(JOB, checkpoint_minutes=2)
    assert job_seconds(by_clock, FOUR).checkpoints == pytest.approx(200 + 2 * 2)  # 339 s of steps
    assert job_seconds(by_clock, FOUR).steps == job_seconds(JOB, FOUR).steps


def test_a_checkpoint_has_the_state_of_each_rank_where_they_differ_which_passes_the_links() -> None:
    memory = FOUR.memory._replace(weights=1e8, gathered=8e8)
    machine = replace(MACHINE, link=LinkFacts(1e9))
    run = replace(NOT_SEARCHED, machine=machine, epochs=1, ranks_per_node=2)
    job = job_seconds(run, replace(FOUR, ranks=8, memory=memory))
    assert job.checkpoints == pytest.approx(9e8 / DISK_BANDWIDTH + 6e8 / 1e9)


def test_the_constants_are_those_of_a_run() -> None:
    # others in other buckets: finer, coarser and equal ones
    assert len(overlaps_of(BSP())) + len(BUCKET_VARIANTS) + 1 == TRIALS
    assert MEASURED_STEPS == 5  # step 0 and steps 1 to 4
    assert AUTOTUNE_CALLS % (1 + AUTOTUNE_REPETITIONS) == 0


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("planning", "5 steps without overlap, and {least} to {most} that are"),
        ("sharp_bits", "(up to {all} steps)"),
        ("step", "which takes {few} to {all} steps"),
    ],
)
def test_pages_have_the_steps_of_a_search(page: str, sentence: str) -> None:
    """A step more than are measured for each trial, of which there is one at least."""
    least, most = (TRIALS * (1 + steps) for steps in (LEAST_TRIAL_STEPS, MOST_TRIAL_STEPS))
    few, all_steps = MEASURED_STEPS + 1 + LEAST_TRIAL_STEPS, MEASURED_STEPS + most
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    assert sentence.format(least=least, most=most, few=few, all=all_steps) in text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1, "0-00:01:00"), (60, "0-00:01:00"), (61, "0-00:02:00"), (3600, "0-01:00:00"), (108_000, "1-06:00:00")],
)
def test_slurm_reads_days_hours_minutes(seconds: float, expected: str) -> None:
    assert slurm_time(seconds) == expected
