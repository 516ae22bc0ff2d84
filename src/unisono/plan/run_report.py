"""Planned runs as a table, and as JSON data.

nodes  step       low-high       computing  communication  update  speedup  ...
    1   486 ms                     486 ms           0 ms    0 ms     1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from unisono.plan.loading import unknown_rates
from unisono.plan.planned_run import PlannedRun
from unisono.plan.run_row import INTERVAL_ERROR, RunPlan
from unisono.plan.scaling import last_worthwhile
from unisono.plan.split import describe_borders
from unisono.plan.split_plan import without_splits
from unisono.plan.text_table import text_table
from unisono.plan.wall_time import job_seconds, slurm_time

HEAD = ("rule", "nodes", "step", "from - to", "computing", "communication", "update")
RESULT = ("speedup", "efficiency")
SETTING = ("memory", "overlap", "buckets", "schedule", "wire")

BASIS_WORDS = {
    "measured": "measured",
    "corrected": "estimated from the link, times what was measured over its own estimate",
    "estimated": "estimated from the link",
}
"""Words for the basis of the cost of an exchange (`exchange_cost.BASES`)."""

MIN_WHOLE_SECONDS = 10
"""Seconds of an epoch from which on they are printed as whole ones."""


def as_lines(plans: Sequence[RunPlan], run: PlannedRun, least: float) -> Iterator[str]:
    """Yield a table of the plans of a run, the bottleneck of each, its splits, the last worthwhile numbers of nodes,
    wall times, and what is not predicted or assumed."""
    machine = run.machine
    yield from _table(plans)
    yield ""
    for plan in plans:
        yield f"{_name(plan)}: {plan.bottleneck}"
    if any(plan.split for plan in plans):
        yield ""
    for plan in plans:
        if plan.split:
            words = ", ".join(f"{layer}: {split}" for layer, split in plan.split.items())
            yield f"{_name(plan)}: {words}; all other layers data parallel"
            yield f"{_name(plan)}: {describe_borders(plan.split)}"
    yield ""
    for rule, nodes in worthwhile(plans, least).items():
        yield f"{rule}: more nodes pay up to {nodes}, where each further node has added {least:g} to the speedup"
    yield _wall_times(plans, run)
    yield (
        f"from - to: the error of predicted communication, {INTERVAL_ERROR:.1%} of a step in 9 of 10 runs in the lab; "
        "computing and the cost of a collective follow from the machine file"
    )
    if any(plan.basis for plan in plans):
        yield f"exchanges: {_bases(plans)}"
    if not machine.node.memory_bandwidth:
        yield "updates and sums take no time here: the machine file has no node.memory_bandwidth"
    yield from unknown_rates(machine, run.samples)
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
        "notes": unknown_rates(run.machine, run.samples),
    }


def worthwhile(plans: Sequence[RunPlan], least: float) -> dict[str, int]:
    """Return the last number of nodes that pays, by rule; one node has a speedup of 1.

    Where layers are split on some numbers of nodes, the rule without splits counts on the others.
    """
    rules = dict.fromkeys(plan.rule for plan in plans)
    speedups = {
        rule: {1: 1.0} | {one.nodes: one.speedup for one in plans if one.rule in (without_splits(rule), rule)}
        for rule in rules
    }
    return {rule: last_worthwhile(sorted(found.items()), least) for rule, found in speedups.items()}


def _wall_times(plans: Sequence[RunPlan], run: PlannedRun) -> str:
    """Return a line with the wall times of the whole job, as `sbatch --time` reads them."""
    if run.epoch_samples is None:
        return "wall time for sbatch --time: not known without the samples of an epoch: --set samples.train=N"
    times = ", ".join(f"{slurm_time(job_seconds(run, plan).total)} ({_name(plan)})" for plan in plans)
    return f"wall time for sbatch --time, {run.epochs} epoch{'s' * (run.epochs > 1)}: {times}"


def _job_data(plan: RunPlan, run: PlannedRun) -> dict[str, Any] | None:
    if run.epoch_samples is None:
        return None
    seconds = job_seconds(run, plan)
    return {**seconds._asdict(), "total": seconds.total, "time": slurm_time(seconds.total)}


def _table(plans: Sequence[RunPlan]) -> Iterator[str]:
    loads, epochs = any(plan.decoding or plan.reading for plan in plans), any(plan.epoch is not None for plan in plans)
    head = (*HEAD, *(("loading",) if loads else ()), *RESULT, *(("epoch",) if epochs else ()), *SETTING)
    yield from text_table([head, *(_cells(plan, loads) for plan in plans)])


def _bases(plans: Sequence[RunPlan]) -> str:
    """Return words for the basis of the exchanges on each number of nodes."""
    found = {basis: dict.fromkeys(str(plan.nodes) for plan in plans if plan.basis == basis) for basis in BASIS_WORDS}
    return "; ".join(
        f"{BASIS_WORDS[basis]} on {', '.join(nodes)} node{'s' * (list(nodes) != ['1'])}"
        for basis, nodes in found.items()
        if nodes
    )


def _cells(plan: RunPlan, loads: bool) -> tuple[str, ...]:
    between = f"{_ms(plan.low)} - {_ms(plan.high)}" if plan.high > plan.low else ""
    parts = (plan.computing, plan.communication, plan.update, *((plan.loading,) if loads else ()))
    return (
        plan.rule,
        str(plan.nodes),
        _ms(plan.step),
        between,
        *map(_ms, parts),
        f"{plan.speedup:.4g}",
        f"{plan.efficiency:.0%}",
        *(
            ()
            if plan.epoch is None
            else (f"{plan.epoch:,.0f} s" if plan.epoch >= MIN_WHOLE_SECONDS else f"{plan.epoch:.2g} s",)
        ),
        f"{plan.memory.total / 1e9:.3g} GB",
        plan.overlap,
        f"{plan.bucket_bytes / (1 << 20):g} MiB",
        plan.schedule or "-",
        plan.wire if plan.schedule else "-",
    )


def _name(plan: RunPlan) -> str:
    return f"{plan.rule}, {plan.nodes} node{'s' * (plan.nodes > 1)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
