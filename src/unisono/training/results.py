"""Test results of an epoch in the words and metrics of its data: accuracy of classes, perplexity of texts.

one label a sample      test_accuracy, test_top5, test_loss        test accuracy 98.10%       1,234 samples/s
a label each token      the same, of tokens, test_perplexity       test perplexity 3.95      17,786 tokens/s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.training.accuracy import Accuracy
from unisono.training.measures import ACCURACY, PERPLEXITY, measure_of


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
    if "tokens_per_second" in metrics:
        return f"{metrics['tokens_per_second']:,.0f} tokens/s"
    return f"{metrics['samples_per_second']:,.0f} samples/s"


def result_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table at the end of a run for its test and its speed, given `result_metrics`."""
    measure = measure_of([metrics])
    rows = [(measure.title, measure.words(metrics[measure.metric]))]
    if measure is PERPLEXITY:
        return [*rows, ("tokens per second", f"{metrics['tokens_per_second']:,.0f}")]
    if "test_top5" in metrics:
        rows.append(("test accuracy, top-5", f"{metrics['test_top5']:.2%}"))
    return [*rows, ("samples per second", f"{metrics['samples_per_second']:,.0f}")]


def last_line(metrics: Mapping[str, Any]) -> str:
    """Return the last line of a run, which scripts read."""
    if measure_of([metrics]) is PERPLEXITY:
        return f"test perplexity: {metrics['test_perplexity']:.2f}"
    return f"test accuracy: {metrics['test_accuracy']:.1%}"
