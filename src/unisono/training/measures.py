"""Measures by which runs are compared, and the metrics of a test: accuracy of classes, perplexity of texts.

measure       labels           metrics of an epoch                            in words    the best
accuracy      one a sample     test_accuracy, test_top5, test_loss            98.10%      the highest
perplexity    one a token      the same, of tokens, and test_perplexity       3.95        the lowest
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    most: float
    """Largest value that there is; the smallest is 0."""
    last_form: str
    """Format in the last line of a run, which scripts read."""
    unit: str
    """Unit by which the speed is counted."""

    @property
    def metric(self) -> str:
        """Key in the metrics of an epoch."""
        return f"test_{self.name}"

    @property
    def title(self) -> str:
        """Name in words."""
        return f"test {self.name}"

    @property
    def extreme(self) -> str:
        """Word for the best of several values."""
        return "highest" if self.higher_is_better else "lowest"

    def words(self, value: float) -> str:
        """Return a value in words."""
        return format(value, self.form)

    def merit(self, value: float) -> float:
        """Return a number that is larger for better values."""
        return value if self.higher_is_better else -value


ACCURACY = Measure("accuracy", "accuracies", True, ".2%", 1.0, ".1%", "samples")
PERPLEXITY = Measure("perplexity", "perplexities", False, ".2f", math.inf, ".2f", "tokens")


def measure_of(metrics: Iterable[Mapping[str, Any]]) -> Measure:
    """Return the measure by which epochs are compared: perplexity if all have it, else accuracy."""
    found = list(metrics)
    return PERPLEXITY if found and all(PERPLEXITY.metric in line for line in found) else ACCURACY


def result_metrics(accuracy: Accuracy, samples_per_second: float, labels_per_sample: int) -> dict[str, Any]:
    """Return the metrics of a test and of the speed of training."""
    found = {ACCURACY.metric: accuracy.top1, "test_loss": accuracy.loss, "samples_per_second": samples_per_second}
    if accuracy.top5 is not None:
        found["test_top5"] = accuracy.top5
    if labels_per_sample > 1:
        found[PERPLEXITY.metric] = accuracy.perplexity
        found["tokens_per_second"] = samples_per_second * labels_per_sample
    return found


def describe_test(metrics: Mapping[str, Any]) -> str:
    """Return words for the test of an epoch."""
    measure = measure_of([metrics])
    five = f" (top-5 {metrics['test_top5']:.2%})" if measure is ACCURACY and "test_top5" in metrics else ""
    return f"{measure.title} {measure.words(metrics[measure.metric])}{five}"


def describe_speed(metrics: Mapping[str, Any]) -> str:
    """Return words for the speed of an epoch."""
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
