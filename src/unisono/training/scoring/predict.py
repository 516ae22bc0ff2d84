"""Predictions of files, one at a time; a file that cannot be read has its error in place of a prediction.

scores (1, 3, 2) of a b c ─ softmax ─▶ b 66.5%, c 24.5%, a 9.0%
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from unisono.compute.prepare import StepContext
from unisono.errors import DecodeError, UsageError


class Inputs(Protocol):
    """Files of the kind that a run was trained on."""

    def predict(self, network: torch.nn.Module, path: Path, options: PredictOptions) -> NetworkPrediction:
        """Return the prediction of a file. Raises OSError where it cannot be read, DecodeError where it is broken."""
        ...


class FilePrediction(NamedTuple):
    """Prediction of a file, or the reason why it has none."""

    file: Path
    prediction: NetworkPrediction | None
    """None where the file cannot be read."""
    error: str = ""


def predict(
    network: torch.nn.Module, inputs: Inputs, files: Iterable[Path], options: PredictOptions
) -> Iterator[FilePrediction]:
    """Yield the prediction of each file, or an error."""
    for file in files:
        try:
            yield FilePrediction(file, inputs.predict(network, file, options))
        except OSError as error:
            yield FilePrediction(file, None, f"{error.strerror or error}; give the path of a file that can be read")
        except DecodeError as error:
            yield FilePrediction(file, None, str(error))


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
