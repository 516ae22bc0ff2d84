"""Handwritten digits that come with scikit-learn: 1,797 grey images of 8 x 8, written by 43 people.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, whose test part this is.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.dataset import Dataset, Samples

TEST = 360
"""Images that are held out: every fifth, so that each writer and each digit is in both parts."""

WHITE = 16.0
"""The brightest value."""


def load() -> Dataset:
    """1,437 images to train on and 360 held out: float32 in [0, 1], shape (samples, 1, 8, 8), and labels 0 to 9."""
    rows = _rows()
    inputs = torch.from_numpy((rows[:, :-1] / WHITE).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(rows[:, -1].astype(np.int64))
    held_out = torch.arange(len(targets)) % 5 == 0
    assert int(held_out.sum()) == TEST, "scikit-learn's digits are not the 1,797 they were"
    return Dataset(
        train=Samples(inputs[~held_out], targets[~held_out]),
        test=Samples(inputs[held_out], targets[held_out]),
        classes=10,
    )


def _rows() -> NDArray[np.float64]:
    """Return 64 pixels and a label for each image, from scikit-learn's file: importing it takes more than a second."""
    package = find_spec("sklearn")
    assert package is not None, "scikit-learn is a dependency"
    assert package.submodule_search_locations is not None, "it is a package"
    folder = Path(package.submodule_search_locations[0])
    with gzip.open(folder / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",")
