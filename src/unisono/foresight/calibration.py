"""Calibration of predictions: their errors and the cover of their intervals, by version or by any label.

    version  runs  error: median, 95th percentile   within the interval        error = |predicted - measured| / measured
    0.1.0      40           3.1%            9.8%    37 of 40, nominally 96%

Worked example: steps of 50, 52 and 60 ms, each predicted as 50 ms +- 7.5%: errors 0, 3.8 and 16.7%, in the median 3.8%,
and 2 of 3 within the interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.foresight.compare import errors_of, explain, ms
from unisono.foresight.ledger import LedgerEntry
from unisono.plan.text_table import text_table

WORST = 5
"""Number of runs with the largest errors that are listed."""


class Calibration(NamedTuple):
    """Errors of a group of runs. Errors and shares are relative, 0 to 1 and more."""

    group: str
    runs: int
    median: float
    high: float
    """95th percentile."""
    intervals: int
    """Runs whose prediction has an interval."""
    covered: int
    """Runs whose measured step is within it."""
    share: float
    """Nominal share of covered runs, mean over the intervals; 0 without any."""


def calibrate(entries: Sequence[LedgerEntry], by: str = "version") -> list[Calibration]:
    """Return the calibration of each group, in the order of their names."""
    groups: dict[str, list[LedgerEntry]] = {}
    for one in entries:
        groups.setdefault(group_of(one, by), []).append(one)
    return [_calibration(name, groups[name]) for name in sorted(groups)]


def _calibration(name: str, entries: Sequence[LedgerEntry]) -> Calibration:
    median, high = np.percentile([one.error for one in entries], [50, 95]).tolist()
    intervals = [one for one in entries if one.prediction.has_interval]
    share = float(np.mean([one.prediction.share for one in intervals])) if intervals else 0.0
    return Calibration(name, len(entries), median, high, len(intervals), sum(one.covered for one in intervals), share)


def group_of(entry: LedgerEntry, by: str) -> str:
    """Return the group of a run by a label, or by a fact of its prediction; "-" where it lacks that label."""
    return entry.labels.get(by, facts_of(entry).get(by, "-"))


def check_label(entries: Sequence[LedgerEntry], by: str) -> None:
    """Raise UsageError, listing the labels, for one that no run has."""
    known = sorted({name for one in entries for name in (*one.labels, *facts_of(one))})
    if entries and by not in known:
        raise UsageError(f"--by {by}: no run has this label; there are {', '.join(known)}")


def facts_of(entry: LedgerEntry) -> Mapping[str, str]:
    """Return what runs can be grouped by besides their labels."""
    run = entry.prediction.run
    return {
        "version": entry.version,
        "sealed": entry.prediction.sealed.split()[0],
        "recipe": run.recipe,
        "model": run.model,
        "rule": run.rule,
        "machine": run.machine or "-",
        "ranks": str(run.ranks),
        "nodes": str(run.nodes),
        "overlap": entry.prediction.program.overlap,
        "wire": entry.prediction.program.wire or "-",
    }


def worst_runs(entries: Sequence[LedgerEntry], count: int) -> list[LedgerEntry]:
    """Return the `count` runs with the largest errors, the worst first."""
    return sorted(entries, key=lambda one: one.error, reverse=True)[:count]


def ledger_lines(entries: Sequence[LedgerEntry], by: str) -> Iterator[str]:
    """Yield a table of the groups, and the worst runs with the cost that was wrong."""
    rows = [(by, "runs", "error, median", "95th percentile", "within the interval")]
    for found in calibrate(entries, by):
        cover = f"{found.covered} of {found.intervals}, nominally {found.share:.0%}"
        errors = f"{found.median:.1%}", f"{found.high:.1%}"
        rows.append((found.group, str(found.runs), *errors, cover if found.intervals else "no intervals"))
    yield from text_table(rows, left={0})
    yield ""
    yield "the largest errors of a step, |predicted - measured| / measured:"
    for one in worst_runs(entries, WORST):
        name = one.run or one.prediction.run.recipe
        step = f"predicted {ms(one.prediction.step)}, measured {ms(one.measurement.step.median)}"
        yield f"{one.error:6.1%}  {name}, {one.version}: {step}; {explain(one.prediction, one.measurement)}"


def ledger_data(entries: Sequence[LedgerEntry], complaints: Sequence[str], by: str) -> dict[str, Any]:
    """Return the groups, the runs and the complaints as data for JSON: seconds, and shares of 1."""
    return {
        "by": by,
        "groups": [one._asdict() for one in calibrate(entries, by)],
        "runs": [{**asdict(one), "error": one.error, "covered": one.covered} for one in entries],
        "complaints": list(complaints),
    }


def part_errors(entry: LedgerEntry) -> dict[str, float]:
    """Return the errors of a run's parts: predicted less measured seconds, over those of the measured step."""
    parts = errors_of(entry.prediction, entry.measurement)
    return {name: -one.off / entry.measurement.step.median for name, one in parts.items()}
