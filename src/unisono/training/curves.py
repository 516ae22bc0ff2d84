"""Curves of a measure over the epochs of runs, read from the metrics in their folders, for charts and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.errors import UsageError
from unisono.training.measures import ACCURACY, Measure, measure_of
from unisono.training.run_directory import METRICS, read_metrics
from unisono.view.chart import Line, draw_curves


@dataclass(frozen=True)
class Curve:
    """Measure of a run after each of its epochs, of which there is one at least."""

    name: str
    epochs: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds since the run began, with tests and checkpoints; time while the run was stopped does not count."""
    values: tuple[float, ...]
    """Values of the measure; of accuracy top-1."""
    top5: tuple[float, ...] = ()
    """Top-5 accuracies, 0 to 1; empty with five classes or fewer, and for other measures."""
    measure: Measure = ACCURACY

    @property
    def last(self) -> float:
        """Value after the last epoch."""
        return self.values[-1]

    @property
    def best(self) -> float:
        """Best value after any epoch."""
        return max(self.values, key=self.measure.merit)

    @property
    def best_epoch(self) -> int:
        """First epoch with the best value; epochs count from 1."""
        return self.epochs[self.values.index(self.best)]


def curve_of(name: str, metrics: Sequence[Mapping[str, Any]], measure: Measure) -> Curve:
    """Return the curve of a run with these lines of metrics, one at least."""
    return Curve(
        name,
        tuple(line["epoch"] for line in metrics),
        tuple(line["elapsed"] for line in metrics),
        tuple(line[measure.metric] for line in metrics),
        tuple(line["test_top5"] for line in metrics if measure is ACCURACY and "test_top5" in line),
        measure,
    )


def curves_of(folders: Sequence[Path]) -> list[Curve]:
    """Return the curves of the runs in folders, of one measure.

    Raises UsageError where no epoch of a run has ended in one of them.
    """
    metrics = [read_metrics(folder) for folder in folders]
    for folder, lines in zip(folders, metrics, strict=True):
        if not lines:
            raise UsageError(f"{folder} has no run with a finished epoch: {METRICS} is empty or missing")
    measure = measure_of(line for lines in metrics for line in lines)
    return [curve_of(folder.resolve().name, lines, measure) for folder, lines in zip(folders, metrics, strict=True)]


def summarize(curve: Curve) -> str:
    """Return a summary line: the last and the best value of a run."""
    minutes, seconds = divmod(round(curve.seconds[-1]), 60)
    measure, value = curve.measure, curve.measure.words(curve.last)
    reached = value if measure is ACCURACY else f"{measure.name} {value}"
    last = f"{curve.name}: {reached} after {curve.epochs[-1]} epochs, {minutes}:{seconds:02} min"
    at = curve.best_epoch
    return last if at == curve.epochs[-1] else f"{last} (best {measure.words(curve.best)} after {at})"


def finite_part(curve: Curve) -> Curve:
    """Return the epochs that a chart has a place for: without those whose value is not finite, after divergence."""
    kept = [number for number, value in enumerate(curve.values) if math.isfinite(value)]
    return replace(
        curve,
        epochs=tuple(curve.epochs[number] for number in kept),
        seconds=tuple(curve.seconds[number] for number in kept),
        values=tuple(curve.values[number] for number in kept),
    )


def draw(curves: Sequence[Curve], title: str = "", form: str = "svg") -> bytes:
    """Return the picture of curves of one measure that have epochs with finite values; its format is `form`."""
    lines = []
    for curve in curves:
        lines.append(
            Line(f"{curve.name}, top-1" if curve.top5 else curve.name, curve.epochs, curve.seconds, curve.values)
        )
        if curve.top5:
            lines.append(Line(f"{curve.name}, top-5", curve.epochs, curve.seconds, curve.top5, beside=True))
    measure = curves[0].measure
    return draw_curves(lines, measure.title, measure is ACCURACY, title, form)
