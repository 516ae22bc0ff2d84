"""Evaluation of a checkpoint: its measures as data, as JSON, and as rows of a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.confusion import Counts, most_frequent_mistakes, precisions, recalls
from unisono.training.scoring.throughput import BatchThroughput

MISTAKES_SHOWN = 3
"""Number of mistakes in the table."""


@dataclass(frozen=True)
class Evaluation:
    """Measures of a network on a test set."""

    classes: tuple[str, ...]
    confusion: Counts
    """Samples by label and first guess."""
    accuracy: Accuracy
    throughput: Sequence[BatchThroughput] = ()
    """Forward passes on one rank, by batch size; empty if they were not measured."""

    @property
    def samples(self) -> int:
        """Number of test samples."""
        return int(self.confusion.sum())


def as_data(found: Evaluation) -> dict[str, Any]:
    """Return the evaluation as data for JSON; a loss that is not finite, and shares of nothing, are None."""
    counts = found.confusion
    each = zip(found.classes, counts.sum(axis=1).tolist(), recalls(counts), precisions(counts), strict=True)
    return {
        "samples": found.samples,
        "loss": found.accuracy.loss if math.isfinite(found.accuracy.loss) else None,
        "top1": found.accuracy.top1,
        "top5": found.accuracy.top5,
        "classes": [
            {"class": name, "samples": samples, "recall": recall, "precision": precision}
            for name, samples, recall, precision in each
        ],
        "confusion": counts.tolist(),
        "throughput": [entry._asdict() for entry in found.throughput],
    }


def rows(found: Evaluation) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: a name, and its value in words."""
    yield "samples", f"{found.samples:,}"
    yield "loss", f"{found.accuracy.loss:.4f}"
    yield "top-1 accuracy", f"{found.accuracy.top1:.2%}"
    if found.accuracy.top5 is not None:
        yield "top-5 accuracy", f"{found.accuracy.top5:.2%}"
    known = [(recall, name) for name, recall in zip(found.classes, recalls(found.confusion), strict=True)]
    recall, name = min(((share, name) for share, name in known if share is not None), key=lambda pair: pair[0])
    yield "lowest recall", f"{name}: {recall:.2%}"
    for mistake in most_frequent_mistakes(found.confusion, MISTAKES_SHOWN):
        yield "mistake", f"{found.classes[mistake.label]} as {found.classes[mistake.guess]}: {mistake.samples:,}"
