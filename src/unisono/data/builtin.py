"""Data sets that come with the package, by the names that a recipe gives them: handwritten digits.

Digits are 1,797 grey images of 8 x 8, the test set of 13 writers. Source: E. Alpaydin and C. Kaynak, Optical
Recognition of Handwritten Digits, UCI, 1998, whose test part this is.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

TEST = 360
"""Number of test images: every fifth one, so that each writer and each digit is in both parts."""

WHITE = 16.0
"""Brightest value of a pixel in the file."""


@dataclass(frozen=True)
class Samples:
    """Inputs, shape (samples, ...), and their labels, shape (samples,), int64."""

    inputs: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """Training set and test set, with the number of classes of both."""

    train: Samples
    test: Samples
    classes: int


def load_digits() -> Dataset:
    """Return 1,437 training and 360 test images: float32 in [0, 1], shape (samples, 1, 8, 8), and labels 0 to 9."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = np.loadtxt(file, delimiter=",")  # 64 pixels and a label each
    inputs = torch.from_numpy((rows[:, :-1] / WHITE).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(rows[:, -1].astype(np.int64))
    in_test = torch.arange(len(targets)) % 5 == 0
    assert int(in_test.sum()) == TEST, "the file has 1,797 rows"
    return Dataset(
        train=Samples(inputs[~in_test], targets[~in_test]),
        test=Samples(inputs[in_test], targets[in_test]),
        classes=10,
    )


BUILTIN_DATASETS: dict[str, Callable[[], Dataset]] = {"digits": load_digits}
