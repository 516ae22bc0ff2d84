"""Predictions of files, one at a time; a file that cannot be read has its error in place of a prediction.

scores (1, 3, 2) of a b c ─ softmax ─▶ b 66.5%, c 24.5%, a 9.0%
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from unisono.errors import DecodeError, UsageError
from unisono.training.scoring.evaluate import Forward


class PredictOptions(NamedTuple):
    """Options of predictions."""

    most: int
    """Number of classes or tokens to name."""
    batch: int = 1
    """Windows of a text that the network takes at once."""


class NetworkPrediction(NamedTuple):
    """Prediction of a network for the contents of a file, as a line and as data for JSON."""

    words: str
    data: dict[str, Any]


class Inputs(Protocol):
    """Files of the kind that a run was trained on."""

    def predict(self, forward: Forward, path: Path, options: PredictOptions) -> NetworkPrediction:
        """Return the prediction of a file. Raises OSError where it cannot be read, DecodeError where it is broken."""
        ...


class FilePrediction(NamedTuple):
    """Prediction of a file, or the reason why it has none."""

    file: Path
    prediction: NetworkPrediction | None
    """None where the file cannot be read."""
    error: str = ""


def predict(
    forward: Forward, inputs: Inputs, files: Iterable[Path], options: PredictOptions
) -> Iterator[FilePrediction]:
    """Yield the prediction of each file by a network in evaluation mode, or an error."""
    for file in files:
        try:
            yield FilePrediction(file, inputs.predict(forward, file, options))
        except OSError as error:
            yield FilePrediction(file, None, f"{error.strerror or error}; give the path of a file that can be read")
        except DecodeError as error:
            yield FilePrediction(file, None, str(error))


def most_probable(scores: torch.Tensor, name_of: Callable[[int], str], most: int) -> list[tuple[str, float]]:
    """Return the `most` most probable classes or tokens with their probabilities, best first, from scores (classes,).

    Raises UsageError for scores that are not finite.
    """
    if not bool(torch.isfinite(scores).all()):
        raise UsageError("the network's scores are not finite: its training has diverged; train it at a lower rate")
    found = scores.double().softmax(0).topk(min(most, len(scores)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [(name_of(number), probability) for number, probability in pairs]
