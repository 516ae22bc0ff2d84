"""Handwritten digits that come with scikit-learn: 1,797 grey images of 8 x 8, written by 43 people.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, whose test part this is.
"""

from __future__ import annotations

import numpy as np
import torch

from unisono.data.dataset import Dataset, Samples

TEST = 360
"""Images that are held out: every fifth, so that each writer and each digit is in both parts."""

WHITE = 16.0
"""The brightest value."""


def load() -> Dataset:
    """1,437 images to train on and 360 held out: float32 in [0, 1], shape (samples, 1, 8, 8), and labels 0 to 9."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  a second to import, and only this data set needs it

    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy((images / WHITE).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    held_out = torch.arange(len(targets)) % 5 == 0
    assert int(held_out.sum()) == TEST, "scikit-learn's digits are not the 1,797 they were"
    return Dataset(
        train=Samples(inputs[~held_out], targets[~held_out]),
        test=Samples(inputs[held_out], targets[held_out]),
        classes=10,
    )
