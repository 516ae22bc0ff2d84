"""Evaluation of samples that have a class each: recall and precision of classes, and their confusion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.training.scoring.confusion import Counts, most_frequent_mistakes, precisions, recalls
from unisono.training.scoring.confusion_chart import draw_confusion
from unisono.training.scoring.evaluation import Evaluation

CONFUSION = "confusion.svg"
"""File of the picture."""

MISTAKES_SHOWN = 3
"""Number of mistakes in the table."""


@dataclass(frozen=True, kw_only=True)
class ClassEvaluation(Evaluation):
    """Measures of a network on samples that have a class each."""

    classes: tuple[str, ...]
    confusion: Counts
    """Samples by label and first guess."""

    def own_data(self) -> dict[str, Any]:
        """Return each class and the confusion."""
        counts = self.confusion
        each = zip(self.classes, counts.sum(axis=1).tolist(), recalls(counts), precisions(counts), strict=True)
        return {
            "classes": [
                {"class": name, "samples": samples, "recall": recall, "precision": precision}
                for name, samples, recall, precision in each
            ],
            "confusion": counts.tolist(),
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield loss, accuracy, the class with the lowest recall, and the most frequent mistakes."""
        yield "samples", f"{self.samples:,}"
        yield "loss", f"{self.accuracy.loss:.4f}"
        yield "top-1 accuracy", f"{self.accuracy.top1:.2%}"
        if self.accuracy.top5 is not None:
            yield "top-5 accuracy", f"{self.accuracy.top5:.2%}"
        known = [(recall, name) for name, recall in zip(self.classes, recalls(self.confusion), strict=True)]
        recall, name = min(((share, name) for share, name in known if share is not None), key=lambda pair: pair[0])
        yield "lowest recall", f"{name}: {recall:.2%}"
        for mistake in most_frequent_mistakes(self.confusion, MISTAKES_SHOWN):
            yield "mistake", f"{self.classes[mistake.label]} as {self.classes[mistake.guess]}: {mistake.samples:,}"

    def images(self, title: str) -> Mapping[str, str]:
        """Return the picture of the confusion."""
        return {CONFUSION: draw_confusion(self.confusion, self.classes, f"{title}: top-1 {self.accuracy.top1:.2%}")}
