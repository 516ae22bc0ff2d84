"""Predictions of files: the most probable classes of each, one file at a time.

file ─ input ─ network ─▶ scores ─ softmax ─▶ 3: 98.2%, 8: 0.9%, 9: 0.3%
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from unisono.compute.precision import StepContext
from unisono.errors import DecodeError, UsageError
from unisono.training.scoring.file_inputs import FileInputs


class ClassProbability(NamedTuple):
    """Class and its probability, 0 to 1."""

    name: str
    probability: float


class FilePrediction(NamedTuple):
    """Most probable classes of a file, or the reason why it has none."""

    file: Path
    classes: tuple[ClassProbability, ...]
    """Best first; empty where the file cannot be read."""
    error: str = ""


def best_classes(scores: torch.Tensor, names: Sequence[str], most: int) -> tuple[ClassProbability, ...]:
    """Return the `most` most probable classes, best first, from the scores of one sample, (classes,).

    Raises UsageError for scores that are not finite.
    """
    if not bool(torch.isfinite(scores).all()):
        raise UsageError("the network's scores are not finite: its training has diverged; train it at a lower rate")
    found = scores.double().softmax(0).topk(min(most, len(names)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return tuple(ClassProbability(names[number], probability) for number, probability in pairs)


def predict(
    network: torch.nn.Module,
    inputs: FileInputs,
    files: Iterable[Path],
    most: int,
    dtype: torch.dtype,
    within: StepContext,
) -> Iterator[FilePrediction]:
    """Yield the prediction of each file: its `most` most probable classes, or an error."""
    for file in files:
        try:
            sample = inputs.read(file)
        except OSError as error:
            yield FilePrediction(file, (), f"{error.strerror or error}; give the path of a file that can be read")
            continue
        except DecodeError as error:
            yield FilePrediction(file, (), str(error))
            continue
        with torch.no_grad(), within():
            scores = network(sample.to(dtype))
        yield FilePrediction(file, best_classes(scores[0], inputs.names, most))
