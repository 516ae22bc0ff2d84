"""Planned runs as a table, as JSON data, and as the wall time that a scheduler is asked for.

nodes  step       low-high       computing  communication  update  speedup  ...
    1   486 ms                     486 ms           0 ms    0 ms     1.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import ceil
from typing import Any

from unisono.errors import UsageError
from unisono.plan.machines import MachineFacts
from unisono.plan.run_plan import LARGEST_ERROR, RunPlan
from unisono.plan.scaling import epoch_seconds, last_worthwhile

HEAD = ("rule", "nodes", "step", "from - to", "computing", "communication", "update", "speedup", "efficiency")
SETTING = ("memory", "overlap", "buckets", "schedule")


def as_lines(plans: Sequence[RunPlan], machine: MachineFacts, least: float) -> Iterator[str]:
    """Yield a table of the plans, the bottleneck of each, the last worthwhile numbers of nodes, and what is assumed."""
    epochs = ("epoch",) if any(plan.epoch is not None for plan in plans) else ()
    rows = [(*HEAD, *epochs, *SETTING), *(_cells(plan) for plan in plans)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield ""
    for plan in plans:
        yield f"{plan.rule}, {plan.nodes} node{'s' * (plan.nodes > 1)}: {plan.bottleneck}"
    yield ""
    for rule, nodes in worthwhile(plans, least).items():
        yield f"{rule}: more nodes pay up to {nodes}, where each further node has added {least:g} to the speedup"
    yield (
        f"from - to: the error of predicted communication, {LARGEST_ERROR:.1%} of a step at most in the lab; computing "
        "and the cost of a collective follow from the machine file"
    )
    for name in sorted({name for plan in plans for name in plan.estimated.split(", ") if name}):
        yield f"estimated, not simulated: buckets along {name}; so many ranks are simulated for halving and ring alone"
    if not machine.node.memory_bandwidth:
        yield "updates and sums take no time here: the machine file has no node.memory_bandwidth"
    for key, reason in machine.assumed.items():
        yield f"assumed, {key}: {reason}"


def as_data(plans: Sequence[RunPlan], machine: MachineFacts, least: float) -> dict[str, Any]:
    """Return the plans as data for JSON: seconds, bytes and shares."""
    rows = [
        {
            **asdict(plan),
            "memory": {**plan.memory._asdict(), "total": plan.memory.total},
            "step": plan.step,
            "efficiency": plan.efficiency,
        }
        for plan in plans
    ]
    return {
        "machine": machine.name,
        "assumed": dict(machine.assumed),
        "rows": rows,
        "least_marginal_efficiency": least,
        "worthwhile_nodes": worthwhile(plans, least),
    }


def worthwhile(plans: Sequence[RunPlan], least: float) -> dict[str, int]:
    """Return the last number of nodes that pays, by rule; one node has a speedup of 1."""
    rules = dict.fromkeys(plan.rule for plan in plans)
    speedups = {rule: {1: 1.0} | {one.nodes: one.speedup for one in plans if one.rule == rule} for rule in rules}
    return {rule: last_worthwhile(sorted(found.items()), least) for rule, found in speedups.items()}


def wall_time(plans: Sequence[RunPlan], epochs: int, minibatch: int, epoch_samples: int | None) -> str:
    """Return the time of `epochs` epochs at the slow end of the interval, in whole minutes, as Slurm reads it:
    days-hours:minutes:seconds.

    Raises UsageError unless there is one plan, of a known number of samples.
    """
    if len(plans) != 1 or epoch_samples is None:
        raise UsageError("--time is that of one rule on one number of nodes, with --epoch-samples: give one of each")
    minutes = ceil(epochs * epoch_seconds(epoch_samples, minibatch, plans[0].high) / 60)
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def _cells(plan: RunPlan) -> tuple[str, ...]:
    between = f"{_ms(plan.low)} - {_ms(plan.high)}" if plan.high > plan.low else ""
    parts = (plan.computing, plan.communication, plan.update)
    return (
        plan.rule,
        str(plan.nodes),
        _ms(plan.step),
        between,
        *map(_ms, parts),
        f"{plan.speedup:.4g}",
        f"{plan.efficiency:.0%}",
        *(() if plan.epoch is None else (f"{plan.epoch:,.0f} s",)),
        f"{plan.memory.total / 1e9:.3g} GB",
        plan.overlap,
        f"{plan.bucket_bytes / (1 << 20):g} MiB",
        plan.schedule or "-",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
