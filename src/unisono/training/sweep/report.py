"""Results of a sweep's runs, read from their metrics, and its report: a table on the screen, Markdown and JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table

from unisono.tables import flat
from unisono.training.measures import ACCURACY, Measure, measure_of
from unisono.training.recipe import to_dict
from unisono.training.run_directory import read_metrics
from unisono.training.sweep.directory import OUTPUT, RunOutcome, RunStatus, Sweep
from unisono.training.sweep.plan import Grid, GridPoint

NONE = "–"


class ReportTable(NamedTuple):
    """Cells of a table, as text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None
    """Number of the row with the best run; None where no run has ended."""


def duration(seconds: float) -> str:
    """Return a time in seconds as text.

    >>> duration(12.34), duration(95), duration(4000)
    ('12.3 s', '1:35 min', '1:06:40 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"


def ending(result: RunResult) -> str:
    """Return the end of a run in a few words."""
    outcome = result.outcome
    if outcome.status is RunStatus.FAILED:
        return f"failed, exit code {outcome.exit_code}"
    return str(outcome.status)


def run_table(grid: Grid, results: Sequence[RunResult]) -> ReportTable:
    """Return the table of the runs. Runs that have not ended have no numbers."""
    best, measure = best_of(results), shared_measure(results)
    keys = tuple(grid.short_keys.values())
    header = (*keys, measure.title, f"{measure.extreme} (epoch)", "time", "samples/s", "result")
    rows = []
    for result in results:
        numbers = (NONE,) * 4
        if (run := result.final) is not None:
            highest = f"{measure.words(run.best_value)} ({run.best_epoch})"
            speed = f"{run.samples_per_second:,.0f}"
            numbers = (measure.words(run.value), highest, duration(run.seconds), speed)
        rows.append((*result.point.values, *numbers, "best" if result is best else ending(result)))
    return ReportTable("Runs", header, tuple(rows), None if best is None else list(results).index(best))


def seed_table(grid: Grid, results: Sequence[RunResult]) -> ReportTable | None:
    """Return the table of mean and spread over seeds; None where the seed is not swept."""
    groups, measure = seed_statistics(grid, results), shared_measure(results)
    if not groups:
        return None
    keys = tuple(short for key, short in grid.short_keys.items() if key != SEED)
    rows = []
    for group in groups:
        mean = NONE if group.mean is None else measure.words(group.mean)
        std = NONE if group.std is None else measure.words(group.std)
        extent = f"{measure.words(min(group.finals))} to {measure.words(max(group.finals))}" if group.finals else NONE
        rows.append((*group.values, mean, std, extent, f"{len(group.finals)} of {group.runs}"))
    means = [group.mean for group in groups if group.mean is not None]
    best = [group.mean for group in groups].index(max(means, key=measure.merit)) if means else None
    header = (*keys, f"mean {measure.title}", "standard deviation", "range", "seeds")
    return ReportTable("Over seeds", header, tuple(rows), best)


def tables(grid: Grid, results: Sequence[RunResult]) -> list[ReportTable]:
    """Return all tables of the report."""
    seeds = seed_table(grid, results)
    return [run_table(grid, results), *([] if seeds is None else [seeds])]


def to_rich(table: ReportTable) -> Table:
    """Return a table for the screen; the best row is bold."""
    shown = Table(title=table.title, title_justify="left")
    for number, name in enumerate(table.header):
        last = number == len(table.header) - 1
        shown.add_column(name, justify="left" if last else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        shown.add_row(*row, style="bold" if number == table.best else None)
    return shown


def to_markdown(sweep: Sweep, results: Sequence[RunResult], diagrams: Sequence[str]) -> str:
    """Return the report as a page, with the names of the diagrams beside it."""
    lines = [f"# Sweep of {next(iter(sweep.recipes.values())).name}", ""]
    lines += [f"- `{axis.key}`: {', '.join(axis.values)}" for axis in sweep.grid.axes]
    for table in tables(sweep.grid, results):
        lines += ["", f"## {table.title}", "", _markdown_row(table.header)]
        lines.append(_markdown_row(["---:"] * (len(table.header) - 1) + ["---"]))
        for number, row in enumerate(table.rows):
            lines.append(_markdown_row([f"**{cell}**" for cell in row] if number == table.best else row))
    failed = [result for result in results if result.outcome.status is RunStatus.FAILED]
    if failed:
        lines += ["", "## Failures", ""]
    for result in failed:
        lines.append(f"- {result.point.label}: `{result.outcome.error}` (`{result.point.name}/{OUTPUT}`)")
    for diagram in diagrams:
        lines += ["", f"![{diagram.removesuffix('.svg').replace('_', ' ')}]({diagram})"]
    return "\n".join([*lines, ""])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def to_json(sweep: Sweep, results: Sequence[RunResult]) -> str:
    """Return the sweep and its results as JSON. Accuracies are shares, 0 to 1; times are seconds.

    Values that JSON has no number for, such as the perplexity of a run that has diverged, are None.
    """
    best, measure = best_of(results), shared_measure(results)
    content: dict[str, Any] = {
        "grid": {axis.key: axis.values for axis in sweep.grid.axes},
        "best": None if best is None else best.point.name,
        "runs": [_run(sweep, result) for result in results],
    }
    keys = [axis.key for axis in sweep.grid.swept if axis.key != SEED]
    if seeds := seed_statistics(sweep.grid, results):
        content["seeds"] = [
            {
                "values": dict(zip(keys, group.values, strict=True)),
                f"test_{measure.plural}": list(map(_finite, group.finals)),
                "mean": _finite(group.mean),
                "std": group.std,
                "runs": group.runs,
            }
            for group in seeds
        ]
    return json.dumps(content, indent=2) + "\n"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _run(sweep: Sweep, result: RunResult) -> dict[str, Any]:
    settings = flat(to_dict(sweep.recipes[result.point.name]))
    found: dict[str, Any] = {
        "name": result.point.name,
        "values": {axis.key: settings[axis.key] for axis in sweep.grid.axes},
        **result.outcome._asdict(),
    }
    if (run := result.summary) is not None:
        found |= {
            "epochs": run.epochs,
            run.measure.metric: _finite(run.value),
            f"best_{run.measure.metric}": _finite(run.best_value),
            "best_epoch": run.best_epoch,
            "seconds": run.seconds,
            "samples_per_second": run.samples_per_second,
        }
    return found


SEED = "training.seed"


@dataclass(frozen=True)
class RunSummary:
    """Metrics of a run after its last finished epoch."""

    epochs: int
    value: float
    """Value of the measure after the last epoch."""
    best_value: float
    """Best value after any epoch."""
    best_epoch: int
    """First epoch with that value; epochs count from 1."""
    seconds: float
    """Seconds since the run began, with tests and checkpoints, without the time in which it was stopped."""
    samples_per_second: float
    """Samples of all epochs / seconds of their steps."""
    measure: Measure = ACCURACY
    """Measure by which all runs of the sweep are compared."""


@dataclass(frozen=True)
class RunResult:
    """Point of the grid, the end of its process and its metrics."""

    point: GridPoint
    outcome: RunOutcome
    summary: RunSummary | None
    """None before the first epoch has ended."""

    @property
    def final(self) -> RunSummary | None:
        """Metrics of a run that has ended; None for all others."""
        return self.summary if self.outcome.status is RunStatus.ENDED else None


class SeedStatistics(NamedTuple):
    """Values of the measure, after the last epoch, of runs that differ in their seed only."""

    values: tuple[str, ...]
    """Values of the swept axes other than the seed."""
    finals: tuple[float, ...]
    """Values of the runs that have ended; may be empty."""
    runs: int
    """Number of runs, including those that have not ended."""

    @property
    def mean(self) -> float | None:
        """Mean; None without runs."""
        return statistics.fmean(self.finals) if self.finals else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None with less than two runs, or if a run has diverged."""
        known = len(self.finals) > 1 and all(map(math.isfinite, self.finals))
        return statistics.stdev(self.finals) if known else None


def summary_of(metrics: Sequence[Mapping[str, Any]], measure: Measure) -> RunSummary | None:
    """Return the summary of a run with these metrics; None where no epoch has ended."""
    if not metrics:
        return None
    values = [line[measure.metric] for line in metrics]
    best = max(values, key=measure.merit)
    seconds = sum(line["seconds"] for line in metrics)
    samples = sum(line["seconds"] * line["samples_per_second"] for line in metrics)
    return RunSummary(
        metrics[-1]["epoch"],
        values[-1],
        best,
        metrics[values.index(best)]["epoch"],
        metrics[-1]["elapsed"],
        samples / seconds,
        measure,
    )


def results_of(sweep: Sweep, outcomes: Mapping[str, RunOutcome]) -> list[RunResult]:
    """Return the result of each run, in the order of the grid. All have one measure."""
    points = sweep.grid.points()
    metrics = [read_metrics(sweep.folder / point.name) for point in points]
    measure = measure_of(line for lines in metrics for line in lines)
    return [
        RunResult(point, outcomes.get(point.name, RunOutcome()), summary_of(lines, measure))
        for point, lines in zip(points, metrics, strict=True)
    ]


def shared_measure(results: Sequence[RunResult]) -> Measure:
    """Return the measure of the results: accuracy before the first epoch has ended."""
    return next((result.summary.measure for result in results if result.summary), ACCURACY)


def best_of(results: Sequence[RunResult]) -> RunResult | None:
    """Return the run with the best value after its last epoch, the quicker of equal ones; None where none has ended."""
    measure = shared_measure(results)
    ended = [(measure.merit(result.final.value), -result.final.seconds, result) for result in results if result.final]
    return max(ended, key=lambda entry: entry[:2])[2] if ended else None


def seed_statistics(grid: Grid, results: Sequence[RunResult]) -> list[SeedStatistics]:
    """Return the statistics of each combination of the other swept axes; empty where the seed is not swept."""
    keys = [axis.key for axis in grid.swept]
    if SEED not in keys:
        return []
    seed = keys.index(SEED)
    groups: defaultdict[tuple[str, ...], list[RunResult]] = defaultdict(list)
    for result in results:
        groups[result.point.values[:seed] + result.point.values[seed + 1 :]].append(result)
    return [
        SeedStatistics(values, tuple(run.final.value for run in runs if run.final), len(runs))
        for values, runs in groups.items()
    ]
