"""Planned runs before and after a change, row by row: what became of the step, and of which part.

    what if       rule  nodes      step       then  change  mostly                  speedup   then  bottleneck then
    bandwidth=2x   bsp     16  802.0 ms   486.3 ms    -39%  communication -315.7 ms   9.702     16  computing: ...

A row is compared with that of its own rule; where the change is one of the rule, with the rows of the new one. Lines
have the steps that change, data have all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from unisono.plan.run_row import RunPlan
from unisono.plan.text_table import text_table

PARTS = ("computing", "communication", "update", "loading")

LEAST_CHANGE = 0.005
"""Least change of a step that has a line in the table, as a share of it."""

HEAD = ("what if", "rule", "nodes", "step", "then", "change", "mostly", "speedup", "then", "bottleneck then")


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
        return {part: getattr(self.after, part) - getattr(self.before, part) for part in PARTS}


def compare(before: Sequence[RunPlan], after: Sequence[RunPlan], change: str) -> list[Comparison]:
    """Return each row before with those after: that of its rule, or all on its nodes where none has its rule.

    A row that the change has added, such as one with split layers, has no row before and is left out.
    """
    kept = {row.rule for row in after}
    return [
        Comparison(change, one, other)
        for one in before
        for other in after
        if one.nodes == other.nodes and (one.rule == other.rule or one.rule not in kept)
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
    if not larger:
        return
    yield from text_table([HEAD, *(_cells(row) for row in larger)], left={0, 6, len(HEAD) - 1})


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


def _cells(row: Comparison) -> tuple[str, ...]:
    before, after = row.before, row.after
    part, seconds = max(row.differences.items(), key=lambda one: abs(one[1]))
    return (
        row.change,
        before.rule if before.rule == after.rule else f"{before.rule} > {after.rule}",
        str(before.nodes),
        f"{before.step * 1e3:,.1f} ms",
        f"{after.step * 1e3:,.1f} ms",
        f"{row.ratio - 1:+.0%}",
        f"{part} {seconds * 1e3:+,.1f} ms",
        f"{before.speedup:.4g}",
        f"{after.speedup:.4g}",
        after.bottleneck,
    )
