"""Results of the runs of a sweep, read from their metrics: accuracy, time, speed, and statistics over seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from unisono.training.run_directory import read_metrics
from unisono.training.sweep.directory import RunOutcome, RunStatus, Sweep
from unisono.training.sweep.plan import Grid, GridPoint

SEED = "training.seed"


@dataclass(frozen=True)
class RunSummary:
    """Metrics of a run after its last finished epoch."""

    epochs: int
    test_accuracy: float
    """Share, 0 to 1, after the last epoch."""
    best_test_accuracy: float
    """Highest share after any epoch."""
    best_epoch: int
    """First epoch with that share; epochs count from 1."""
    seconds: float
    """Seconds since the run began, with tests and checkpoints, without the time in which it was stopped."""
    samples_per_second: float
    """Samples of all epochs / seconds of their steps."""


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
    """Test accuracies, after the last epoch, of runs that differ in their seed only."""

    values: tuple[str, ...]
    """Values of the swept axes other than the seed."""
    accuracies: tuple[float, ...]
    """Shares of the runs that have ended; may be empty."""
    runs: int
    """Number of runs, including those that have not ended."""

    @property
    def mean(self) -> float | None:
        """Mean share; None without runs."""
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def std(self) -> float | None:
        """Sample standard deviation (n - 1); None with less than two runs."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def summary_of(folder: Path) -> RunSummary | None:
    """Return the summary of the run in a folder; None where no epoch has ended."""
    metrics = read_metrics(folder)
    if not metrics:
        return None
    best = max(metrics, key=lambda line: line["test_accuracy"])
    seconds = sum(line["seconds"] for line in metrics)
    samples = sum(line["seconds"] * line["samples_per_second"] for line in metrics)
    return RunSummary(
        metrics[-1]["epoch"],
        metrics[-1]["test_accuracy"],
        best["test_accuracy"],
        best["epoch"],
        metrics[-1]["elapsed"],
        samples / seconds,
    )


def results_of(sweep: Sweep, outcomes: Mapping[str, RunOutcome]) -> list[RunResult]:
    """Return the result of each run, in the order of the grid."""
    return [
        RunResult(point, outcomes.get(point.name, RunOutcome()), summary_of(sweep.folder / point.name))
        for point in sweep.grid.points()
    ]


def best_of(results: Sequence[RunResult]) -> RunResult | None:
    """Return the run with the highest final test accuracy, the quicker of equal ones; None where no run has ended."""
    ended = [(result.final.test_accuracy, -result.final.seconds, result) for result in results if result.final]
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
        SeedStatistics(values, tuple(run.final.test_accuracy for run in runs if run.final), len(runs))
        for values, runs in groups.items()
    ]
