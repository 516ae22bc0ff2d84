"""Values of the papers, as `unisono papers` has them, and predictions of them by figure and quantity."""

from __future__ import annotations

from unisono.papers.figures import PaperPrediction, find_figure

Predictions = dict[str, dict[str, PaperPrediction]]
"""Predictions by figure, as pcl-dnn-figure-4, and quantity."""


def theirs(figure: str, quantity: str) -> float:
    """Return a value of a paper."""
    (value,) = [row.value for row in find_figure(figure).rows if row.quantity == quantity]
    assert value is not None, quantity
    return value
