"""Curves of test accuracy over time and over epochs, for one or more runs (as in DIMD's figures 13 and 14).

    accuracy                         accuracy
    │      ╭──── top-5               │      ╭──── top-5
    │   ╭──╯ ╭── top-1               │   ╭──╯ ╭── top-1
    │  ╱  ╭──╯                       │  ╱  ╭──╯
    └──────────── minutes            └──────────── epochs

They are read from the metrics in the runs' folders. Runs on texts have curves of perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import UsageError
from unisono.training.measures import ACCURACY, Measure, measure_of
from unisono.training.run_directory import METRICS, read_metrics


@dataclass(frozen=True)
class Curve:
    """Measure of a run after each of its epochs."""

    name: str
    epochs: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds since the run began, with tests and checkpoints; time while the run was stopped does not count."""
    values: tuple[float, ...]
    """Values of the measure; of accuracy top-1."""
    top5: tuple[float, ...]
    """Top-5 accuracies, 0 to 1; empty with five classes or fewer, and for other measures."""
    measure: Measure = ACCURACY


def curves_of(folders: Sequence[Path]) -> list[Curve]:
    """Return the curves of the runs in folders, of one measure.

    Raises UsageError where no epoch of a run has ended in one of them.
    """
    metrics = [read_metrics(folder) for folder in folders]
    for folder, lines in zip(folders, metrics, strict=True):
        if not lines:
            raise UsageError(f"{folder} has no run with a finished epoch: {METRICS} is empty or missing")
    measure = measure_of(line for lines in metrics for line in lines)
    return [
        Curve(
            folder.resolve().name,
            tuple(line["epoch"] for line in lines),
            tuple(line["elapsed"] for line in lines),
            tuple(line[measure.metric] for line in lines),
            tuple(line["test_top5"] for line in lines if measure is ACCURACY and "test_top5" in line),
            measure,
        )
        for folder, lines in zip(folders, metrics, strict=True)
    ]


def finite_part(curve: Curve) -> Curve:
    """Return the epochs that a chart has a place for: without those whose value is not finite, after divergence."""
    kept = [number for number, value in enumerate(curve.values) if math.isfinite(value)]
    return replace(
        curve,
        epochs=tuple(curve.epochs[number] for number in kept),
        seconds=tuple(curve.seconds[number] for number in kept),
        values=tuple(curve.values[number] for number in kept),
    )


def summarize(curve: Curve) -> str:
    """Return a summary line: the last and the best value of a run."""
    minutes, seconds = divmod(round(curve.seconds[-1]), 60)
    measure, best = curve.measure, max(curve.values, key=curve.measure.merit)
    at = curve.epochs[curve.values.index(best)]
    value = measure.words(curve.values[-1])
    reached = value if measure is ACCURACY else f"{measure.name} {value}"
    last = f"{curve.name}: {reached} after {curve.epochs[-1]} epochs, {minutes}:{seconds:02} min"
    return last if at == curve.epochs[-1] else f"{last} (best {measure.words(best)} after {at})"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw curves of one measure into a file, whose suffix sets the format: over minutes beside over epochs."""
    from matplotlib.figure import Figure  # noqa: PLC0415  only who draws needs it

    figure, measure = Figure(figsize=(11, 4.5), layout="constrained"), curves[0].measure
    left, right = figure.subplots(1, 2, sharey=True)
    for number, curve in enumerate(curves):
        minutes = [seconds / 60 for seconds in curve.seconds]
        name = f"{curve.name}, top-1" if measure is ACCURACY else curve.name
        for axes, across in ((left, minutes), (right, list(curve.epochs))):
            color = f"C{number % 10}"
            axes.plot(across, curve.values, color=color, marker=".", label=name)
            if curve.top5:
                axes.plot(across, curve.top5, color=color, marker=".", linestyle=":", label=f"{curve.name}, top-5")
    left.set(xlabel="minutes", ylabel=measure.title, xlim=(0, None))
    right.set(xlabel="epochs", xlim=(0, None))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        if measure is ACCURACY:
            axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    right.legend(fontsize=8, loc="lower right" if measure.higher_is_better else "upper right")
    figure.savefig(path)
