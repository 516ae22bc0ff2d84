"""Calibration of predictions: their errors and the cover of their intervals, by version or by any label.

    version  runs  error: median, 95th percentile   within the interval        error = |predicted - measured| / measured
    0.1.0      40           3.1%            9.8%    37 of 40, nominally 96%

Worked example: steps of 50, 52 and 60 ms, each predicted as 50 ms +- 7.5%: errors 0, 3.8 and 16.7%, in the median 3.8%,
and 2 of 3 within the interval. The chart shows predicted against measured steps, and the errors by part:

predicted │      ╱ ┃              updates    ·  │ ··        A vertical bar is the interval of a prediction; the dashed
          │    ╱┃●                exchanges    ·│·          line is that of equal times. On the right each dot is a
          │  ╱● ┃                 waiting     ··│ ·         run: predicted less measured seconds over those of the
          │╱                      computing    ·│··   ·     measured step.
          └────────── measured    └─────────────┴─────
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono.errors import UsageError
from unisono.foresight.compare import errors_of, explain, ms
from unisono.foresight.ledger import LedgerEntry
from unisono.plan.chart import COLORS, GRAY, chart
from unisono.plan.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


ROW = 0.7
"""Height of a part's row in which the dots of its groups lie, in rows."""


def part_errors(entry: LedgerEntry) -> dict[str, float]:
    """Return the errors of a run's parts: predicted less measured seconds, over those of the measured step."""
    parts = errors_of(entry.prediction, entry.measurement)
    return {name: -one.off / entry.measurement.step.median for name, one in parts.items()}


def draw_calibration(entries: Sequence[LedgerEntry], by: str, path: Path) -> None:
    """Write the chart as SVG, with a color for each group.

    Raises UsageError without matplotlib, without runs, and for a file that cannot be written.
    """
    if not entries:
        raise UsageError(f"--chart {path}: the ledger has no runs to draw")
    names = sorted({group_of(one, by) for one in entries})
    groups = {name: [one for one in entries if group_of(one, by) == name] for name in names}
    with chart(path, (11, 5)) as figure:
        left, right = figure.subplots(1, 2)
        _draw_steps(left, groups, by)
        _draw_parts(right, groups)
        for axes in (left, right):
            axes.grid(color=GRAY, alpha=0.3)


def _draw_steps(axes: Axes, groups: dict[str, list[LedgerEntry]], by: str) -> None:
    every = [one for rows in groups.values() for one in rows]
    ends = [1e3 * one.measurement.step.median for one in every] + [1e3 * one.prediction.step for one in every]
    low, high = min(ends) / 1.3, max(ends) * 1.3
    axes.plot([low, high], [low, high], color=GRAY, linestyle="--", linewidth=1, label="equal")
    for number, (name, rows) in enumerate(groups.items()):
        color = COLORS[number % len(COLORS)]
        measured = [1e3 * one.measurement.step.median for one in rows]
        predicted = [1e3 * one.prediction.step for one in rows]
        axes.vlines(
            measured,
            [1e3 * one.prediction.low for one in rows],
            [1e3 * one.prediction.high for one in rows],
            color=color,
            linewidth=1,
        )
        axes.plot(measured, predicted, color=color, linestyle="", marker="o", markersize=3, label=f"{by} {name}")
    axes.set(xlabel="measured step, ms", ylabel="predicted step, ms", xscale="log", yscale="log")
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False)


def _draw_parts(axes: Axes, groups: dict[str, list[LedgerEntry]]) -> None:
    parts = list(part_errors(next(iter(groups.values()))[0]))[::-1]
    for number, rows in enumerate(groups.values()):
        shift = ROW * (0.5 - (number + 0.5) / len(groups))
        errors = [part_errors(one) for one in rows]
        across = [found[part] for found in errors for part in parts]
        up = [place + shift for _ in errors for place in range(len(parts))]
        axes.plot(across, up, color=COLORS[number % len(COLORS)], linestyle="", marker="o", markersize=4, alpha=0.7)
    axes.axvline(0, color=GRAY, linewidth=1)
    axes.set(xlabel="predicted less measured, of the measured step")
    axes.set_yticks(range(len(parts)), parts)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:+.0%}" if share else "0")
