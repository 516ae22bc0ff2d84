"""Measures by which runs are compared, and their curves over epochs: accuracy of classes, perplexity of texts.

measure       labels           metrics of an epoch                            in words    the best
accuracy      one a sample     test_accuracy, test_top5, test_loss            98.10%      the highest
perplexity    one a token      the same, of tokens, and test_perplexity       3.95        the lowest
loss          any              test_loss                                      0.1235      the lowest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import UsageError
from unisono.training.run_directory import METRICS, read_metrics
from unisono.view.chart import Line, draw_curves

if TYPE_CHECKING:
    from unisono.training.accuracy import Accuracy  # needs PyTorch, which who compares runs does not


@dataclass(frozen=True)
class Measure:
    """Measure of a test."""

    name: str
    plural: str
    higher_is_better: bool
    form: str
    """Format of a value in words."""
    last_form: str
    """Format in the last line of a run, which scripts read."""
    unit: str
    """Unit by which the speed is counted."""

    @property
    def metric(self) -> str:
        return f"test_{self.name}"

    @property
    def title(self) -> str:
        return f"test {self.name}"

    @property
    def extreme(self) -> str:
        """Word for the best of several values."""
        return "highest" if self.higher_is_better else "lowest"

    def words(self, value: float) -> str:
        return format(value, self.form)

    def merit(self, value: float) -> float:
        """Return a number that is larger for better values."""
        return value if self.higher_is_better else -value


def finite(value: float | None) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None


ACCURACY = Measure("accuracy", "accuracies", True, ".2%", ".1%", "samples")
LOSS = Measure("loss", "losses", False, ".4f", ".4f", "samples")
PERPLEXITY = Measure("perplexity", "perplexities", False, ".2f", ".2f", "tokens")


def measure_of(metrics: Iterable[Mapping[str, Any]]) -> Measure:
    """Return the measure by which epochs are compared: perplexity if all have it, else accuracy."""
    lines = list(metrics)
    return PERPLEXITY if lines and all(PERPLEXITY.metric in line for line in lines) else ACCURACY


def result_metrics(accuracy: Accuracy, samples_per_second: float, labels_per_sample: int) -> dict[str, Any]:
    """Return the metrics of a test and of the speed of training."""
    metrics = {ACCURACY.metric: accuracy.top1, "test_loss": accuracy.loss, "samples_per_second": samples_per_second}
    if accuracy.top5 is not None:
        metrics["test_top5"] = accuracy.top5
    if labels_per_sample > 1:
        metrics[PERPLEXITY.metric] = accuracy.perplexity
        metrics["tokens_per_second"] = samples_per_second * labels_per_sample
    return metrics


def describe_test(metrics: Mapping[str, Any]) -> str:
    measure = measure_of([metrics])
    five = f" (top-5 {metrics['test_top5']:.2%})" if measure is ACCURACY and "test_top5" in metrics else ""
    return f"{measure.title} {measure.words(metrics[measure.metric])}{five}"


def describe_speed(metrics: Mapping[str, Any]) -> str:
    unit = measure_of([metrics]).unit
    return f"{metrics[f'{unit}_per_second']:,.0f} {unit}/s"


def result_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table at the end of a run for its test and its speed, given `result_metrics`."""
    measure = measure_of([metrics])
    rows = [(measure.title, measure.words(metrics[measure.metric]))]
    if measure is ACCURACY and "test_top5" in metrics:
        rows.append(("test accuracy, top-5", f"{metrics['test_top5']:.2%}"))
    return [*rows, (f"{measure.unit} per second", f"{metrics[f'{measure.unit}_per_second']:,.0f}")]


def last_line(metrics: Mapping[str, Any]) -> str:
    """Return the last line of a run, which scripts read."""
    measure = measure_of([metrics])
    return f"{measure.title}: {metrics[measure.metric]:{measure.last_form}}"


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
        return self.values[-1]

    @property
    def best(self) -> float:
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


def curves_of(folders: Sequence[Path], chosen: Measure | None = None) -> list[Curve]:
    """Return the curves of the runs in folders, of one measure: `chosen`, or that by which they are compared. Raises
    UsageError where no epoch of a run has ended in one of them."""
    metrics = [read_metrics(folder) for folder in folders]
    for folder, lines in zip(folders, metrics, strict=True):
        if not lines:
            raise UsageError(f"{folder} has no run with a finished epoch: {METRICS} is empty or missing")
    measure = chosen or measure_of(line for lines in metrics for line in lines)
    curves = list[Curve]()
    for folder, lines in zip(folders, metrics, strict=True):
        try:
            curves.append(curve_of(folder.resolve().name, lines, measure))
        except KeyError as error:
            raise UsageError(f"{folder / METRICS}: a line has no {error}: it is damaged; remove that line") from error
    return curves


def summarize(curve: Curve) -> str:
    """Return a summary line: the last and the best value of a run."""
    minutes, seconds = divmod(round(curve.seconds[-1]), 60)
    measure, value = curve.measure, curve.measure.words(curve.last)
    reached = value if measure is ACCURACY else f"{measure.name} {value}"
    last = f"{curve.name}: {reached} after {curve.epochs[-1]} epochs, {minutes}:{seconds:02} min"
    best_epoch = curve.best_epoch
    return last if best_epoch == curve.epochs[-1] else f"{last} (best {measure.words(curve.best)} after {best_epoch})"


def finite_part(curve: Curve) -> Curve:
    """Return the epochs that a chart has a place for: without those whose value is not finite, after divergence."""
    kept = list(map(math.isfinite, curve.values))
    epochs, seconds = tuple(compress(curve.epochs, kept)), tuple(compress(curve.seconds, kept))
    return replace(curve, epochs=epochs, seconds=seconds, values=tuple(compress(curve.values, kept)))


def draw(curves: Sequence[Curve], title: str = "", form: str = "svg") -> bytes:
    """Return the picture of curves of one measure that have epochs with finite values; its format is `form`."""
    lines = []
    for curve in curves:
        name = f"{curve.name}, top-1" if curve.top5 else curve.name
        lines.append(Line(name, curve.epochs, curve.seconds, curve.values))
        if curve.top5:
            lines.append(Line(f"{curve.name}, top-5", curve.epochs, curve.seconds, curve.top5, beside=True))
    measure = curves[0].measure
    return draw_curves(lines, measure.title, measure is ACCURACY, title, form)
