"""Measures by which runs are compared: accuracy of classes, perplexity of texts.

measure       metric of an epoch    in words    the best
accuracy      test_accuracy         98.10%      the highest
perplexity    test_perplexity       3.95        the lowest

Runs have the metrics that the kind of their samples has (`results.py`), and accuracy always: of texts that of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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


ACCURACY = Measure("accuracy", "accuracies", True, ".2%", 1.0)
PERPLEXITY = Measure("perplexity", "perplexities", False, ".2f", math.inf)


def measure_of(metrics: Iterable[Mapping[str, Any]]) -> Measure:
    """Return the measure by which epochs are compared: perplexity if all have it, else accuracy."""
    found = list(metrics)
    return PERPLEXITY if found and all(PERPLEXITY.metric in line for line in found) else ACCURACY
