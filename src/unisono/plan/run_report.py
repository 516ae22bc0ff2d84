"""Planned runs as a table and as JSON data, also beside those after a change (`docs/planning.md` shows them).

A row is compared with that of its own rule; where the change is one of the rule, with the rows of the new one. Lines
have the steps that change, data have all.

**Wall time** of a job that trains, part by part (sources: `docs/planning.md`), is what a scheduler is asked for:

    │ start │ pack │ tuning │ epoch 0: steps │ test │ checkpoint │ epoch 1: steps │ test │ checkpoint │ ...

Worked example: 100 epochs of 60 steps. A step takes 50 ms: 25 ms of computing, 5 ms of updates, 30 ms of collectives.
Steps take 6,000 * 1.13 * 50 ms = 339 s, tuning adds 5 * (60 - 50) ms + 7 * 5 * 0.15 * 50 ms = 0.31 s. A test has 160
samples on each rank, whose forward passes take 50 ms: 5 s for all. A checkpoint of 200 MB at 100 MB/s takes 2 s, 100 of
them 200 s. With the start that is 20 + 0.31 + 339 + 5 + 200 = 564.31 s, for which 10 minutes are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import pairwise
from math import ceil, inf
from typing import Any, NamedTuple

from unisono.formats import column_table, counted
from unisono.plan.choose import StepParts, is_searched
from unisono.plan.collective_costs import BASES
from unisono.plan.layer_plan import ParallelPlan, Split
from unisono.plan.loading import held_bytes, unknown_rates
from unisono.plan.planned_run import PlannedRun, computing_of, product_seconds
from unisono.plan.run_plan import INTERVAL_ERROR, LEAST_SHOWN, WITH_SPLITS, RunPlan, inputs_of, split_inputs
from unisono.plan.split import SplitInputs, describe_borders, gradient_bytes, sent_of
from unisono.plan.trials import search_seconds
from unisono.step.rule import RankState
from unisono.wires import encoded_share

LEAST_CHANGE = 0.005
"""Least change of a step that has a line in the table, as a share of it."""

MIN_WHOLE_SECONDS = 10
"""Seconds of an epoch from which on they are printed as whole ones."""

START_SECONDS = 20.0
"""Seconds of a run besides those that follow from it: 6.0 and 6.5 s were measured with one and two ranks on 2 busy
cores (`unisono train digits`, one epoch); three times that is assumed, for imports by many nodes from one disk."""

STEP_MARGIN = 1.13
"""Seconds of a step over those predicted: none of 40 sealed runs took more than 12.2% longer (`benchmarks/foresight`).
A plan's interval has 9 of 10 runs; with its end for each step, 3 of 20 jobs ended 1 to 4% too late."""

DISK_BANDWIDTH = 1e8
"""Bytes per second of checkpoints and packs where the machine file has no disk.bandwidth: a slow disk, assumed."""

AUTOTUNE_CALLS = 15
"""Calls of each pass of a convolution before the first step: 5 algorithms, once untimed and twice timed."""


def as_lines(plans: Sequence[RunPlan], run: PlannedRun, least: float) -> Iterator[str]:
    """Yield a table of the plans of a run, the bottleneck of each, its splits, the last worthwhile numbers of nodes,
    wall times, and what is not predicted or assumed."""
    machine = run.machine
    loads, epochs = any(plan.decoding or plan.reading for plan in plans), any(plan.epoch is not None for plan in plans)
    shown = [name for name in COLUMNS if (loads or name != "loading") and (epochs or name != "epoch")]
    yield from column_table([(name, COLUMNS[name]) for name in shown], plans)
    yield ""
    for plan in plans:
        yield f"{_name(plan)}: {plan.bottleneck}"
    split = [plan for plan in plans if plan.split]
    if split:
        yield ""
    for plan in split:
        yield f"{_name(plan)}: {ParallelPlan(plan.split)}; all other layers data parallel"
        yield f"{_name(plan)}: {describe_borders(plan.split)}"
    yield ""
    for rule, nodes in worthwhile(plans, least).items():
        yield f"{rule}: more nodes pay up to {nodes}: so far each further node adds at least {least:g} to the speedup"
    if run.epoch_samples is None:
        yield "wall time for sbatch --time: not known without the samples of an epoch: --set samples.train=N"
    else:
        times = ", ".join(f"{slurm_time(job_seconds(run, plan).total)} ({_name(plan)})" for plan in plans)
        yield f"wall time for sbatch --time, {counted(run.epochs, 'epoch')}: {times}"
    yield (
        f"from - to: the error of predicted communication, {INTERVAL_ERROR:.1%} of a step in 9 of 10 runs in the lab; "
        "computing and the cost of a collective follow from the machine file"
    )
    if any(plan.basis for plan in plans):
        yield f"exchanges: {_bases(plans)}"
    if not machine.node.memory_bandwidth:
        yield "updates and sums take no time here: the machine file has no node.memory_bandwidth"
    if machine.node.accelerators and not machine.node.device_memory_bytes:
        yield "memory of accelerators is not known, nor checked: the machine file has no node.device_memory_bytes"
    yield from (*unknown_rates(machine, run.samples), *run.notes)
    for row in machine.networks:
        yield (
            f"computing: {row.samples_per_second:g} samples/s of a node, as the machine file has them for {row.name}, "
            f"{row.batch} a step{' of an accelerator' * bool(machine.node.accelerators)}"
        )
    for key, reason in machine.assumptions.items():
        yield f"assumed, {key}: {reason}"


def as_data(plans: Sequence[RunPlan], run: PlannedRun, least: float) -> dict[str, Any]:
    """Return the plans of a run as data for JSON: seconds, bytes and shares."""
    rows = [
        {
            **asdict(plan),
            "split": {name: str(split) for name, split in plan.split.items()},
            "memory": {**plan.memory._asdict(), "total": plan.memory.total},
            "step": plan.step,
            "efficiency": plan.efficiency,
            "job": _job_data(plan, run),
        }
        for plan in plans
    ]
    return {
        "machine": run.machine.name,
        "assumed": dict(run.machine.assumptions),
        "rows": rows,
        "least_marginal_efficiency": least,
        "worthwhile_nodes": worthwhile(plans, least),
        "notes": [*unknown_rates(run.machine, run.samples), *run.notes],
    }


def worthwhile(plans: Sequence[RunPlan], least: float) -> dict[str, int]:
    """Return the last number of nodes that pays, by rule; one node has a speedup of 1.

    Where layers are split on some numbers of nodes, the rule without splits counts on the others.
    """
    rules = dict.fromkeys(plan.rule for plan in plans)
    speedups = {
        rule: {1: 1.0} | {row.nodes: row.speedup for row in plans if row.rule in (rule.removesuffix(WITH_SPLITS), rule)}
        for rule in rules
    }
    return {rule: last_worthwhile(sorted(by_nodes.items()), least) for rule, by_nodes in speedups.items()}


def last_worthwhile(speedups: Sequence[tuple[int, float]], least: float) -> int:
    """Return the last number of nodes, of (nodes, speedup) in rising order, up to which each further node has added at
    least `least` to the speedup: marginal efficiency, the difference of speedups over that of nodes.

    >>> last_worthwhile([(1, 1.0), (2, 1.9), (4, 3.2), (8, 3.6)], 0.5)
    4
    """
    last = speedups[0][0]
    for (fewer, before), (nodes, speedup) in pairwise(speedups):
        if speedup - before < least * (nodes - fewer):
            break
        last = nodes
    return last


def _job_data(plan: RunPlan, run: PlannedRun) -> dict[str, Any] | None:
    if run.epoch_samples is None:
        return None
    seconds = job_seconds(run, plan)
    return {**seconds._asdict(), "total": seconds.total, "time": slurm_time(seconds.total)}


def _bases(plans: Sequence[RunPlan]) -> str:
    """Return words for the basis of the exchanges on each number of nodes."""
    nodes_of_basis = {basis: dict.fromkeys(str(plan.nodes) for plan in plans if plan.basis == basis) for basis in BASES}
    return "; ".join(
        f"{BASES[basis]} on {', '.join(nodes)} node{'s' * (list(nodes) != ['1'])}"
        for basis, nodes in nodes_of_basis.items()
        if nodes
    )


def _epoch(plan: RunPlan) -> str:
    seconds = plan.epoch or 0.0
    return f"{seconds:,.0f} s" if seconds >= MIN_WHOLE_SECONDS else f"{seconds:.2g} s"


def _name(plan: RunPlan) -> str:
    return f"{plan.rule}, {counted(plan.nodes, 'node')}"


def _ms(seconds: float) -> str:
    """Return milliseconds with a decimal; below 10 with three digits, as a step of a small network on many nodes has.

    >>> _ms(1.2345), _ms(0.00012345), _ms(1e-18)
    ('1,234.5 ms', '0.123 ms', '0.0 ms')
    """
    return f"{seconds * 1e3:.3g} ms" if LEAST_SHOWN <= seconds < 0.01 else f"{seconds * 1e3:,.1f} ms"


COLUMNS: Mapping[str, Callable[[RunPlan], str]] = {
    "rule": lambda plan: plan.rule,
    "nodes": lambda plan: str(plan.nodes),
    "step": lambda plan: _ms(plan.step),
    "from - to": lambda plan: f"{_ms(plan.low)} - {_ms(plan.high)}" if plan.high > plan.low else "",
    "computing": lambda plan: _ms(plan.computing),
    "communication": lambda plan: _ms(plan.communication),
    "update": lambda plan: _ms(plan.update),
    "loading": lambda plan: _ms(plan.loading),
    "speedup": lambda plan: f"{plan.speedup:.4g}",
    "efficiency": lambda plan: f"{plan.efficiency:.0%}",
    "epoch": _epoch,
    "memory": lambda plan: f"{plan.memory.total / 1e9:.3g} GB",
    "overlap": lambda plan: plan.overlap,
    "buckets": lambda plan: f"{plan.bucket_bytes / (1 << 20):g} MiB",
    "schedule": lambda plan: plan.schedule or "-",
    "wire": lambda plan: plan.wire if plan.schedule else "-",
}
"""Columns of the table: head, and cell of a plan."""


class JobSeconds(NamedTuple):
    """Seconds of a job, by part."""

    start: float
    pack: float
    tuning: float
    steps: float
    tests: float
    checkpoints: float

    @property
    def total(self) -> float:
        """Seconds of the whole job."""
        return sum(self)


def job_seconds(run: PlannedRun, plan: RunPlan) -> JobSeconds:
    """Return the seconds of the whole job of a run, on the nodes of `plan`. Its samples of an epoch are known."""
    assert run.epoch_samples is not None
    steps, disk = ceil(run.epoch_samples / run.minibatch), run.machine.disk.bandwidth or DISK_BANDWIDTH
    packed = run.samples._replace(buffers=0.0)  # which fill beside the steps
    held = held_bytes(packed, run.epoch_samples, plan.nodes, plan.ranks) * run.ranks_per_node
    at = plan.samples / run.traced
    forward = sum(product_seconds(each, each.forward_flops, run.machine, "forward", at) for each in run.layers)
    loading = max(plan.reading, plan.decoding) / plan.samples
    test = ceil(run.test_samples / plan.ranks) * (run.ranks_per_node * forward / run.traced + loading)
    written = sum(layer.parameter_bytes + layer.gradient_bytes * run.kept for layer in run.layers)
    if gathered := plan.memory.gathered:  # of every rank, beside their mean or anchor
        written = plan.memory.weights + gathered
    came = gathered * (1 - 1 / plan.nodes)  # over the link of rank 0's node
    checkpoint = written / disk + (came / run.machine.link.total_bandwidth if came else 0.0)
    tuning = AUTOTUNE_CALLS * plan.computing if run.autotunes else 0.0
    if is_searched(run.rule) and plan.ranks > 1:
        tuning += search_seconds(plan.step, plan.computing + plan.update + plan.communicating)
    trained, within = run.epochs * steps * plan.step * STEP_MARGIN, (steps - 1) // (run.checkpoint_every or steps)
    return JobSeconds(
        START_SECONDS,
        held / disk,
        tuning,
        trained,
        run.epochs * test,
        (run.epochs * (1 + within) + trained // (60 * run.checkpoint_minutes or inf)) * checkpoint,
    )


def slurm_time(seconds: float) -> str:
    """Return a time in whole minutes, rounded up, as Slurm reads it: days-hours:minutes:seconds.

    >>> slurm_time(564.2), slurm_time(86_400 + 3_601)
    ('0-00:10:00', '1-01:01:00')
    """
    minutes = ceil(seconds / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


class Comparison(NamedTuple):
    """Row of a plan, and the row of the same number of nodes after a change."""

    change: str
    before: RunPlan
    after: RunPlan

    @property
    def ratio(self) -> float:
        """Seconds of the step after the change over those before."""
        return self.after.step / self.before.step

    @property
    def differences(self) -> dict[str, float]:
        """Seconds that each part of the step became longer."""
        return {one.name: getattr(self.after, one.name) - getattr(self.before, one.name) for one in fields(StepParts)}


def compare(before: Sequence[RunPlan], after: Sequence[RunPlan], change: str) -> list[Comparison]:
    """Return each row before with those after: that of its rule, or all on its nodes where none there has its rule.

    A row that the change has added, such as one with split layers, has no row before and is left out.
    """
    kept = {(row.rule, row.nodes) for row in after}
    return [
        Comparison(change, one, other)
        for one in before
        for other in after
        if one.nodes == other.nodes and (one.rule == other.rule or (one.rule, one.nodes) not in kept)
    ]


def changed_rules(before: Sequence[RunPlan], after: Sequence[RunPlan], change: str) -> list[RunPlan]:
    """Return the rows after a change as those of rules of their own, without rules that it leaves as they are."""
    rules = {row.rule for row in after if row not in before}
    return [replace(row, rule=f"{row.rule}, {change}") for row in after if row.rule in rules]


def comparison_lines(rows: Sequence[Comparison]) -> Iterator[str]:
    """Yield a table of the rows whose step changes by LEAST_CHANGE or more, a line each."""
    larger = [row for row in rows if abs(row.ratio - 1) >= LEAST_CHANGE]
    if len(larger) < len(rows):
        yield f"what if: steps that change by less than {LEAST_CHANGE:.1%}, left out: {len(rows) - len(larger)}"
    if larger:
        yield from column_table(CHANGE_COLUMNS, larger, left={0, 6, len(CHANGE_COLUMNS) - 1})


def comparison_data(rows: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the rows as data for JSON: seconds, and the ratio of the steps."""
    return [
        {
            "change": row.change,
            "nodes": row.before.nodes,
            "rule": row.before.rule,
            "rule_then": row.after.rule,
            "step": row.before.step,
            "step_then": row.after.step,
            "ratio": row.ratio,
            "differences": row.differences,
            "speedup": row.before.speedup,
            "speedup_then": row.after.speedup,
            "bottleneck_then": row.after.bottleneck,
        }
        for row in rows
    ]


def _mostly(row: Comparison) -> str:
    part, seconds = max(row.differences.items(), key=lambda item: abs(item[1]))
    return f"{part} {'-' if seconds < 0 else '+'}{_ms(abs(seconds))}"


CHANGE_COLUMNS: Sequence[tuple[str, Callable[[Comparison], str]]] = [
    ("what if", lambda row: row.change),
    ("rule", lambda row: " > ".join(dict.fromkeys((row.before.rule, row.after.rule)))),
    ("nodes", lambda row: str(row.before.nodes)),
    ("step", lambda row: _ms(row.before.step)),
    ("then", lambda row: _ms(row.after.step)),
    ("change", lambda row: f"{row.ratio - 1:+.0%}"),
    ("mostly", _mostly),
    ("speedup", lambda row: f"{row.before.speedup:.4g}"),
    ("then", lambda row: f"{row.after.speedup:.4g}"),
    ("bottleneck then", lambda row: row.after.bottleneck),
]


class PlannedLayer(NamedTuple):
    """Layer in a step on a number of nodes. Times are seconds."""

    name: str
    kind: str
    flops: float
    """FLOPs of a step on all nodes."""
    weights: int
    """Bytes of its parameters."""
    parallelism: str
    """"data", or its split in words of a parallel plan."""
    computing: float
    """Its three passes on a rank."""
    gradients: float
    """Their exchange, hidden or not."""
    activations: float
    """Their exchanges, which are waited for; 0 in data parallelism."""
    sent: float
    """Bytes that a rank sends for both in a step."""


def layers_of(run: PlannedRun, splits: Mapping[str, Split]) -> list[PlannedLayer]:
    """Return the layers with parameters or FLOPs of a run with these splits, in the order of the forward pass.

    The run has a model to split.
    """
    assert run.split is not None
    return planned_layers(run, split_inputs(run, inputs_of(run, run.exchange.cost), run.split(run.ranks)[0]), splits)


def planned_layers(run: PlannedRun, inputs: SplitInputs, splits: Mapping[str, Split]) -> list[PlannedLayer]:
    """Return the layers as `layers_of`, from the inputs of their splits: gradients encoded by the wire between nodes,
    weights that a sharded rule gathers as they are, and of a rule that exchanges every so many steps the mean."""
    ranks, share = inputs.links.placement.ranks, encoded_share(run.wire) if run.nodes > 1 else 1.0
    share = (1 + share) / 2 if run.rule.traits.state is RankState.SHARDED else share
    seconds = [computing_of([layer], run.machine, run.traced, run.samples_of_rank).whole for layer in run.layers]
    total, scale, period = sum(seconds), run.minibatch / run.traced, run.rule.traits.period
    facts, rows = {layer.name: layer for layer in inputs.layers}, list[PlannedLayer]()
    for layer, took in zip(run.layers, seconds, strict=True):
        if layer.name not in facts or not (layer.flops or layer.parameters):
            continue
        layer_facts, split = facts[layer.name], splits.get(layer.name)
        sent = sent_of(inputs, layer_facts, split)
        gradients = gradient_bytes(layer_facts.gradient_bytes, ranks, split.ranks if split else 1)
        rows.append(
            PlannedLayer(
                layer.name or "(model)",
                layer.kind,
                layer.flops * scale,
                layer_facts.parameter_bytes,
                str(split or "data"),
                inputs.step.costs.computing.whole * (took / total if total else 0.0),
                sent.gradients / period,
                sent.activations,
                sent.nbytes - gradients * (1 - share / period),
            )
        )
    return rows


LAYER_COLUMNS: Sequence[tuple[str, Callable[[PlannedLayer], str]]] = [
    ("layer", lambda row: row.name),
    ("kind", lambda row: row.kind),
    ("GFLOP", lambda row: f"{row.flops / 1e9:,.4g}"),
    ("weights", lambda row: f"{row.weights / 1e6:,.4g} MB"),
    ("parallelism", lambda row: row.parallelism),
    ("computing", lambda row: f"{row.computing * 1e3:,.2f} ms"),
    ("gradients", lambda row: f"{row.gradients * 1e3:,.2f} ms"),
    ("activations", lambda row: f"{row.activations * 1e3:,.2f} ms"),
    ("sent", lambda row: f"{row.sent / 1e6:,.4g} MB"),
]


def layer_lines(rows: Sequence[PlannedLayer]) -> Iterator[str]:
    """Yield the table, a line each."""
    yield from column_table(LAYER_COLUMNS, rows, left={0, 1, 4})
