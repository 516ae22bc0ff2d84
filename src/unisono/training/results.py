"""Test results of an epoch in the words and metrics of its data: accuracy of classes, perplexity of texts.

one label a sample      test_accuracy, test_top5, test_loss        test accuracy 98.10%       1,234 samples/s
a label each token      the same, of tokens, test_perplexity       test perplexity 3.95      17,786 tokens/s
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.training.accuracy import Accuracy


def result_metrics(accuracy: Accuracy, samples_per_second: float, labels_per_sample: int) -> dict[str, Any]:
    """Return the metrics of a test and of the speed of training."""
    found = {"test_accuracy": accuracy.top1, "test_loss": accuracy.loss, "samples_per_second": samples_per_second}
    if accuracy.top5 is not None:
        found["test_top5"] = accuracy.top5
    if labels_per_sample > 1:
        found["test_perplexity"] = accuracy.perplexity
        found["tokens_per_second"] = samples_per_second * labels_per_sample
    return found


def describe_test(metrics: Mapping[str, Any]) -> str:
    """Return words for the test of an epoch."""
    if "test_perplexity" in metrics:
        return f"test perplexity {metrics['test_perplexity']:.2f}"
    best = f" (top-5 {metrics['test_top5']:.2%})" if "test_top5" in metrics else ""
    return f"test accuracy {metrics['test_accuracy']:.2%}{best}"


def describe_speed(metrics: Mapping[str, Any]) -> str:
    """Return words for the speed of an epoch."""
    if "tokens_per_second" in metrics:
        return f"{metrics['tokens_per_second']:,.0f} tokens/s"
    return f"{metrics['samples_per_second']:,.0f} samples/s"


def result_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table at the end of a run for its test and its speed, given `result_metrics`."""
    speed = ("samples per second", f"{metrics['samples_per_second']:,.0f}")
    if "test_perplexity" in metrics:
        tokens = ("tokens per second", f"{metrics['tokens_per_second']:,.0f}")
        return [("test perplexity", f"{metrics['test_perplexity']:.2f}"), tokens]
    rows = [("test accuracy", f"{metrics['test_accuracy']:.2%}")]
    if "test_top5" in metrics:
        rows.append(("test accuracy, top-5", f"{metrics['test_top5']:.2%}"))
    return [*rows, speed]


def last_line(metrics: Mapping[str, Any]) -> str:
    """Return the last line of a run, which scripts read."""
    if "test_perplexity" in metrics:
        return f"test perplexity: {metrics['test_perplexity']:.2f}"
    return f"test accuracy: {metrics['test_accuracy']:.1%}"
