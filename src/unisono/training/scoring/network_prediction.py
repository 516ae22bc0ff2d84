"""Prediction of a network for a file: what commands print and write, and the most probable classes or tokens of scores.

scores (1, 3, 2) of a b c ─ softmax ─▶ b 66.5%, c 24.5%, a 9.0%
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from unisono.compute.prepare import StepContext
from unisono.errors import UsageError


class Probability(NamedTuple):
    """Class or token and its probability, 0 to 1."""

    name: str
    probability: float


@dataclass(frozen=True)
class PredictOptions:
    """Options of predictions."""

    most: int
    """Number of classes or tokens to name."""
    batch: int
    """Windows of a text that the network takes at once."""
    dtype: torch.dtype
    """Number format of the network."""
    within: StepContext
    """Context in which the network computes."""


class NetworkPrediction(ABC):
    """Prediction of a network for the contents of a file."""

    @abstractmethod
    def words(self) -> str:
        """Return the prediction as a line."""

    @abstractmethod
    def as_data(self) -> dict[str, Any]:
        """Return the prediction as data for JSON."""


def most_probable(scores: torch.Tensor, name_of: Callable[[int], str], most: int) -> tuple[Probability, ...]:
    """Return the `most` most probable classes or tokens, best first, from scores of shape (classes,).

    Raises UsageError for scores that are not finite.
    """
    if not bool(torch.isfinite(scores).all()):
        raise UsageError("the network's scores are not finite: its training has diverged; train it at a lower rate")
    found = scores.double().softmax(0).topk(min(most, len(scores)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return tuple(Probability(name_of(number), probability) for number, probability in pairs)
