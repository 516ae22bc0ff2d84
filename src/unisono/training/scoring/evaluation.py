"""Evaluation of a checkpoint: its measures as data for JSON, and as rows of a table.

a label a sample       `class_evaluation.py`     accuracy, recall and precision of each class, confusion
a label each token     `token_evaluation.py`     perplexity, bits per byte
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unisono.training.accuracy import Accuracy
from unisono.training.scoring.throughput import BatchThroughput


@dataclass(frozen=True, kw_only=True)
class Evaluation(ABC):
    """Measures of a network on a test set."""

    samples: int
    """Number of test samples."""
    accuracy: Accuracy
    """Accuracy and loss of all labels."""
    throughput: Sequence[BatchThroughput] = ()
    """Forward passes on one rank, by batch size; empty if they were not measured."""

    speed_unit: ClassVar[str] = "samples/s"
    """Unit of `speed`."""
    remark: ClassVar[str] = ""
    """Words on what an evaluation of this kind does not have."""

    @abstractmethod
    def own_data(self) -> dict[str, Any]:
        """Return the measures that only evaluations of this kind have, as data for JSON."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the table: a name, and its value in words."""

    def images(self, title: str) -> Mapping[str, str]:  # noqa: ARG002  a default
        """Return SVG documents by file name; `title` has the run and its data."""
        return {}

    def speed(self, entry: BatchThroughput) -> float:
        """Return the throughput at a batch size in `speed_unit`."""
        return entry.samples_per_second

    def throughput_data(self, entry: BatchThroughput) -> dict[str, Any]:
        """Return the throughput at a batch size as data for JSON."""
        return entry._asdict()

    def as_data(self) -> dict[str, Any]:
        """Return the evaluation as data for JSON; measures that are not finite, and shares of nothing, are None."""
        return {
            "samples": self.samples,
            "loss": finite(self.accuracy.loss),
            "top1": self.accuracy.top1,
            "top5": self.accuracy.top5,
            **self.own_data(),
            "throughput": [self.throughput_data(entry) for entry in self.throughput],
        }


def finite(value: float) -> float | None:
    """Return the value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
