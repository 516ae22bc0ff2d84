"""A data set in memory."""

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
    """What is trained on, and what is held out to test with."""

    train: Samples
    test: Samples
    classes: int
