"""Data set in memory, with a training set and a test set."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
