"""Predictions of files, one at a time; a file that cannot be read has its error in place of a prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from unisono.errors import DecodeError
from unisono.training.scoring.network_prediction import NetworkPrediction, PredictOptions


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
