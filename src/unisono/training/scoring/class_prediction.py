"""Prediction of the class of a sample.

sample ─ network ─▶ scores ─ softmax ─▶ 3: 98.2%, 8: 0.9%, 9: 0.3%
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.training.scoring.network_prediction import NetworkPrediction, PredictOptions, Probability, most_probable


@dataclass(frozen=True)
class ClassPrediction(NetworkPrediction):
    """Most probable classes of a sample."""

    classes: tuple[Probability, ...]
    """Best first."""

    def words(self) -> str:
        """Return the classes with their probabilities."""
        return "  ".join(f"{name} {probability:.2%}" for name, probability in self.classes)

    def as_data(self) -> dict[str, Any]:
        """Return the classes."""
        return {"classes": [{"class": name, "probability": share} for name, share in self.classes]}


def predict_class(
    network: torch.nn.Module, sample: torch.Tensor, names: Sequence[str], options: PredictOptions
) -> ClassPrediction:
    """Return the prediction of a sample, a batch of one, by a network in evaluation mode."""
    with torch.no_grad(), options.within():
        scores = network(sample.to(options.dtype))
    return ClassPrediction(most_probable(scores[0], names.__getitem__, options.most))
