"""Results of the runs of a sweep, read from their metrics: test, time, speed, and statistics over seeds."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.training.measures import ACCURACY, Measure, measure_of
from unisono.training.run_directory import read_metrics
from unisono.training.sweep.directory import RunOutcome, RunStatus, Sweep
from unisono.training.sweep.plan import Grid, GridPoint

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
