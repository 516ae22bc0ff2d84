"""Results of a sweep's runs, read from their metrics: the best run, statistics over seeds, JSON, tables, heat maps.

every  learning_rate  seed  accuracy         heat maps have the first two swept keys, and means over seeds:
1      0.05           0     0.5
1      0.05           1     0.6              learning_rate   0.05   0.1
1      0.1            0     0.7              every   1        55%   70%      one map for each combination of other keys
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

from unisono.formats import format_duration, markdown_table
from unisono.tables import flat
from unisono.training.measures import ACCURACY, Curve, Measure, curve_of, finite, measure_of
from unisono.training.recipe import to_dict
from unisono.training.run_directory import read_metrics
from unisono.training.sweep.grid import OUTPUT, Grid, GridPoint, RunOutcome, RunStatus, Sweep
from unisono.view.heat_map import HeatCell, HeatMap

SEED, NONE = "training.seed", "–"


@dataclass(frozen=True)
class RunResult:
    """Point of the grid, the end of its process and its metrics."""

    point: GridPoint
    outcome: RunOutcome
    curve: Curve | None = None
    """None before the first epoch has ended."""
    speed: float = 0.0
    """Samples of all epochs / seconds of their steps."""

    @property
    def final(self) -> Curve | None:
        """Curve of a run that has ended; None for all others."""
        return self.curve if self.outcome.status is RunStatus.ENDED else None


def results_of(sweep: Sweep, outcomes: Mapping[str, RunOutcome]) -> list[RunResult]:
    """Return the result of each run, in the order of the grid. All have one measure."""
    points = sweep.grid.points()
    metrics = [read_metrics(sweep.folder / point.name) for point in points]
    measure, results = measure_of(line for lines in metrics for line in lines), list[RunResult]()
    for point, lines in zip(points, metrics, strict=True):
        curve = curve_of(point.label, lines, measure) if lines else None
        samples = sum(line["seconds"] * line["samples_per_second"] for line in lines)
        speed = samples / sum(line["seconds"] for line in lines) if lines else 0.0
        results.append(RunResult(point, outcomes.get(point.name, RunOutcome()), curve, speed))
    return results


def shared_measure(results: Sequence[RunResult]) -> Measure:
    """Return the measure of the results: accuracy before the first epoch has ended."""
    return next((result.curve.measure for result in results if result.curve), ACCURACY)


def best_of(results: Sequence[RunResult]) -> RunResult | None:
    """Return the run with the best value after its last epoch, the quicker of equal ones; None where none has ended."""
    merit = shared_measure(results).merit
    ended = [(merit(run.last), -run.seconds[-1], result) for result in results if (run := result.final)]
    return max(ended, key=lambda entry: entry[:2])[2] if ended else None


class RunGroup(NamedTuple):
    """Values of the measure, after the last epoch, of runs that agree in some swept keys."""

    values: tuple[str, ...]
    """Values of these keys."""
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


def grouped(grid: Grid, results: Sequence[RunResult], keys: Collection[str]) -> list[RunGroup]:
    """Return a group for each combination of values of these swept keys, in the order of the grid."""
    indexes = [index for index, key in enumerate(grid.swept) if key in keys]
    groups: defaultdict[tuple[str, ...], list[RunResult]] = defaultdict(list)
    for result in results:
        groups[tuple(result.point.values[index] for index in indexes)].append(result)
    return [
        RunGroup(values, tuple(run.final.last for run in runs if run.final), len(runs))
        for values, runs in groups.items()
    ]


def keys_beside_seed(grid: Grid) -> list[str]:
    return [key for key in grid.swept if key != SEED]


def to_json(sweep: Sweep, results: Sequence[RunResult]) -> str:
    """Return the sweep and its results as JSON. Accuracies are shares, 0 to 1; times are seconds. Values that JSON
    has no number for, such as the perplexity of a run that has diverged, are None."""
    best, measure, grid = best_of(results), shared_measure(results), sweep.grid
    runs = list[dict[str, Any]]()
    for result in results:
        settings = to_dict(sweep.recipes[result.point.name])
        flattened = flat(settings)  # a layer's name may have dots
        values = {
            key: flattened[key] if key in flattened else reduce(getitem, key.split("."), settings) for key in grid.axes
        }
        runs.append({"name": result.point.name, "values": values, **result.outcome._asdict()})
        if (curve := result.curve) is not None:
            runs[-1] |= {
                "epochs": curve.epochs[-1],
                measure.metric: finite(curve.last),
                f"best_{measure.metric}": finite(curve.best),
                "best_epoch": curve.best_epoch,
                "seconds": curve.seconds[-1],
                "samples_per_second": result.speed,
            }
    content: dict[str, Any] = {
        "grid": grid.axes,
        "best": None if best is None else best.point.name,
        "runs": runs,
    }
    if SEED in grid.swept:
        keys = keys_beside_seed(grid)
        content["seeds"] = [
            {
                "values": dict(zip(keys, group.values, strict=True)),
                f"test_{measure.plural}": list(map(finite, group.finals)),
                "mean": finite(group.mean),
                "std": group.std,
                "runs": group.runs,
            }
            for group in grouped(grid, results, keys)
        ]
    return json.dumps(content, indent=2) + "\n"


class ReportTable(NamedTuple):
    """Cells of a table, as text; the last column is one of words."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None
    """Number of the row with the best run; None where no run has ended."""


def tables(grid: Grid, results: Sequence[RunResult]) -> list[ReportTable]:
    """Return the tables of the report: of the runs, and of mean and spread over seeds where they are swept."""
    return [run_table(grid, results), *([seed_table(grid, results)] if SEED in grid.swept else [])]


def run_table(grid: Grid, results: Sequence[RunResult]) -> ReportTable:
    """Return the table of the runs. Runs that have not ended have no numbers."""
    best, measure = best_of(results), shared_measure(results)
    header = (*grid.short_keys.values(), measure.title, f"{measure.extreme} (epoch)", "time", "samples/s", "result")
    rows = []
    for result in results:
        numbers = (NONE,) * 4
        if (run := result.final) is not None:
            highest = f"{measure.words(run.best)} ({run.best_epoch})"
            numbers = (measure.words(run.last), highest, format_duration(run.seconds[-1]), f"{result.speed:,.0f}")
        rows.append((*result.point.values, *numbers, "best" if result is best else result.outcome.words))
    return ReportTable("Runs", header, tuple(rows), None if best is None else list(results).index(best))


def seed_table(grid: Grid, results: Sequence[RunResult]) -> ReportTable:
    keys, measure = keys_beside_seed(grid), shared_measure(results)
    groups = grouped(grid, results, keys)
    rows = []
    for group in groups:
        mean, std = (NONE if value is None else measure.words(value) for value in (group.mean, group.std))
        extent = f"{measure.words(min(group.finals))} to {measure.words(max(group.finals))}" if group.finals else NONE
        rows.append((*group.values, mean, std, extent, f"{len(group.finals)} of {group.runs}"))
    known = [(measure.merit(group.mean), -index) for index, group in enumerate(groups) if group.mean is not None]
    header = (*(grid.short_keys[key] for key in keys), f"mean {measure.title}", "standard deviation", "range", "seeds")
    return ReportTable("Over seeds", header, tuple(rows), -max(known)[1] if known else None)


def to_markdown(sweep: Sweep, results: Sequence[RunResult], diagrams: Sequence[str]) -> str:
    """Return the report as a page, with the names of the diagrams beside it."""
    axes = sweep.grid.axes
    lines = [f"# Sweep of {sweep.name}", "", *(f"- `{key}`: {', '.join(values)}" for key, values in axes.items())]
    for table in tables(sweep.grid, results):
        rows = [[f"**{cell}**" for cell in row] if index == table.best else row for index, row in enumerate(table.rows)]
        lines += ["", f"## {table.title}", "", *markdown_table(table.header, rows, left=[len(table.header) - 1])]
    failed = [result for result in results if result.outcome.status is RunStatus.FAILED]
    lines += ["", "## Failures", ""] if failed else []
    for result in failed:
        lines.append(f"- {result.point.label}: `{result.outcome.error}` (`{result.point.name}/{OUTPUT}`)")
    for diagram in diagrams:
        lines += ["", f"![{diagram.removesuffix('.svg').replace('_', ' ')}]({diagram})"]
    return "\n".join([*lines, ""])


def heat_maps(grid: Grid, results: Sequence[RunResult]) -> list[HeatMap]:
    """Return the heat maps of a sweep: none where less than two keys are swept. Where the seed is swept with at least
    two other keys, cells have the mean over seeds."""
    keys = keys_beside_seed(grid) if len(grid.swept) > 2 else list(grid.swept)
    if len(keys) < 2:
        return []
    short, measure, (down, across, *others) = grid.short_keys, shared_measure(results), keys
    means = {group.values: group.mean for group in grouped(grid, results, keys)}
    known = [measure.merit(mean) for mean in means.values() if mean is not None and math.isfinite(mean)]

    def cell(mean: float | None) -> HeatCell:
        if mean is None or not math.isfinite(mean):
            return HeatCell(NONE if mean is None else measure.words(mean))
        worst, best = min(known), max(known)
        return HeatCell(measure.words(mean), (measure.merit(mean) - worst) / (best - worst) if best != worst else 1.0)

    return [
        HeatMap(
            ", ".join(f"{short[key]} = {value}" for key, value in zip(others, rest, strict=True)),
            (short[down], short[across]),
            grid.axes[down],
            grid.axes[across],
            [[cell(means[row, column, *rest]) for column in grid.axes[across]] for row in grid.axes[down]],
        )
        for rest in dict.fromkeys(values[2:] for values in means)
    ]
