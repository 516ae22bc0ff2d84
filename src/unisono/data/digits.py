"""Handwritten digits, which come with the package: 1,797 grey images of 8 x 8, the test set of 13 writers.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, whose test part this is.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.dataset import Dataset, Samples

TEST = 360
"""Number of test images: every fifth one, so that each writer and each digit is in both parts."""

WHITE = 16.0
"""Brightest value of a pixel in the file."""


def load() -> Dataset:
    """Return 1,437 training and 360 test images: float32 in [0, 1], shape (samples, 1, 8, 8), and labels 0 to 9."""
    rows = _rows()
    inputs = torch.from_numpy((rows[:, :-1] / WHITE).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(rows[:, -1].astype(np.int64))
    in_test = torch.arange(len(targets)) % 5 == 0
    assert int(in_test.sum()) == TEST, "the file has 1,797 rows"
    return Dataset(
        train=Samples(inputs[~in_test], targets[~in_test]),
        test=Samples(inputs[in_test], targets[in_test]),
        classes=10,
    )


def _rows() -> NDArray[np.float64]:
    """Return 64 pixels and a label per image."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        return np.loadtxt(file, delimiter=",")
