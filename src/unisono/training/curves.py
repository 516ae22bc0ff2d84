"""Curves of test accuracy over time and over epochs, for one or more runs (as in DIMD's figures 13 to 16).

    accuracy                         accuracy
    │      ╭──── top-5               │      ╭──── top-5
    │   ╭──╯ ╭── top-1               │   ╭──╯ ╭── top-1
    │  ╱  ╭──╯                       │  ╱  ╭──╯
    └──────────── minutes            └──────────── epochs

They are read from the metrics in the runs' folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import UsageError
from unisono.training.run_directory import METRICS, read_metrics


@dataclass(frozen=True)
class Curve:
    """Test accuracy of a run after each of its epochs."""

    name: str
    epochs: tuple[int, ...]
    seconds: tuple[float, ...]
    """Seconds since the run began, with tests and checkpoints; time while the run was stopped does not count."""
    top1: tuple[float, ...]
    """Shares, 0 to 1."""
    top5: tuple[float, ...]
    """Shares, 0 to 1; empty with five classes or fewer."""


def curve_of(folder: Path) -> Curve:
    """Return the curve of the run in a folder. Raises UsageError where no epoch of a run has ended there."""
    found = read_metrics(folder)
    if not found:
        raise UsageError(f"{folder} has no run with a finished epoch: {METRICS} is empty or missing")
    return Curve(
        folder.resolve().name,
        tuple(line["epoch"] for line in found),
        tuple(line["elapsed"] for line in found),
        tuple(line["test_accuracy"] for line in found),
        tuple(line["test_top5"] for line in found if "test_top5" in line),
    )


def summarize(curve: Curve) -> str:
    """Return a summary line: the last and the best accuracy of a run."""
    minutes, seconds = divmod(round(curve.seconds[-1]), 60)
    best = max(curve.top1)
    at = curve.epochs[curve.top1.index(best)]
    last = f"{curve.name}: {curve.top1[-1]:.2%} after {curve.epochs[-1]} epochs, {minutes}:{seconds:02} min"
    return last if at == curve.epochs[-1] else f"{last} (best {best:.2%} after {at})"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw curves into a file, whose suffix sets the format: (minutes, accuracy) beside (epochs, accuracy)."""
    from matplotlib.figure import Figure  # noqa: PLC0415  only who draws needs it

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for number, curve in enumerate(curves):
        minutes = [seconds / 60 for seconds in curve.seconds]
        for axes, across in ((left, minutes), (right, list(curve.epochs))):
            color = f"C{number % 10}"
            axes.plot(across, curve.top1, color=color, marker=".", label=f"{curve.name}, top-1")
            if curve.top5:
                axes.plot(across, curve.top5, color=color, marker=".", linestyle=":", label=f"{curve.name}, top-5")
    left.set(xlabel="minutes", ylabel="test accuracy", xlim=(0, None))
    right.set(xlabel="epochs", xlim=(0, None))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.yaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
    right.legend(fontsize=8, loc="lower right")
    figure.savefig(path)
