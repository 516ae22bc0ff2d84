"""Data sets that come with the package, by the names that a recipe gives them, in the memory of every rank.

Digits are 1,797 grey images of 8 x 8, the test set of 13 writers. Source: E. Alpaydin and C. Kaynak, Optical
Recognition of Handwritten Digits, UCI, 1998, whose test part this is.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unisono.data.feed import Feed
from unisono.data.loading import Batch, Reader
from unisono.data.order import Numbers, Sampler, parse_shuffle
from unisono.engine import Observe, observed
from unisono.world import World


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
    name: str = ""


def load_digits() -> Dataset:
    """Return 1,437 training and 360 test images: float32 in [0, 1], shape (samples, 1, 8, 8), and labels 0 to 9."""
    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as file:
        rows = np.loadtxt(file, delimiter=",")  # 64 pixels from 0 to 16, and a label each
    inputs = torch.from_numpy((rows[:, :-1] / 16.0).astype(np.float32)).view(-1, 1, 8, 8)
    targets = torch.from_numpy(rows[:, -1].astype(np.int64))
    in_test = torch.arange(len(targets)) % 5 == 0  # so that each writer and each digit is in both parts
    train, test = (Samples(inputs[chosen], targets[chosen]) for chosen in (~in_test, in_test))
    return Dataset(train, test, 10, "digits")


BUILTIN_DATASETS: dict[str, Callable[[], Dataset]] = {"digits": load_digits}


class RowReader(Reader):
    """Batches of samples in the memory of every rank."""

    def __init__(self, data: Dataset, samples: Samples, world: World, observe: Observe | None = None) -> None:
        """Keep the samples, a part of `data`. `observe` is called with the span of each batch that is read."""
        super().__init__(data.classes, samples.inputs.shape[1], torch.zeros_like(samples.inputs[:1]))
        self.title, self.names = data.name, tuple(map(str, range(data.classes)))
        self.samples, self.sampler = len(samples), Sampler(len(samples), world)
        self._rows, self._observe = samples, observe

    def batches(self, wanted: Iterable[Numbers], seed: int | None = None, epoch: int = 0) -> Generator[Batch]:  # noqa: ARG002  nothing is random
        for numbers in wanted:
            rows = torch.from_numpy(numbers)
            with observed(self._observe, "read batch", "loading"):
                batch = self._rows.inputs[rows], self._rows.labels[rows]
            yield batch


def in_memory_feed(
    data: Dataset, world: World, seed: int, observe: Observe | None = None, shuffle: str = "epoch"
) -> Feed:
    """Return the feed of a small data set, of which every rank holds a copy.

    `observe` is called with the span of each shuffle and of each batch that is read.
    """
    train, test = (RowReader(data, samples, world, observe) for samples in (data.train, data.test))
    known = f"{train.samples} in memory"
    return Feed(train, test, seed, known, shuffle=parse_shuffle(shuffle), held=train.samples, observe=observe)
