"""Feeds: batches of a run, here from a data set that every rank holds; `packed_feed.py` has that of packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.dataset import Dataset, Samples
from unisono.data.loading import Batch
from unisono.data.order import epoch_order, own_numbers, share, steps_of, test_ranges, worker_order
from unisono.data.shuffle_options import ShuffleOptions
from unisono.engine import Observe, observed
from unisono.world import World


class InputFacts(Protocol):
    """Facts of a network's inputs, for which it is built."""

    classes: int
    channels: int
    """Input channels of the network: channels of an image, or numbers in a window of a recording."""

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        ...


class Feed(InputFacts, Protocol):
    """Batches for the ranks of a world. The order of an epoch depends on the seed and the shuffle, not on the ranks."""

    samples: int
    """Number of training samples, on all ranks together."""
    test_samples: int
    """Number of test samples, on all ranks together."""
    fingerprint: str
    """Fingerprint of the data, with which a resumed run checks that they are the same."""
    notes: tuple[str, ...]
    """Lines on what was chosen, for the start of a run."""
    labels_per_sample: int
    """Labels of a sample: 1, its class, or the tokens of a window of text, which are its channels."""

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Return this rank's share of an epoch from step `done` on. Collective; one epoch at a time."""
        ...

    def test_batches(self, batch: int) -> Iterator[Batch]:
        """Return this rank's share of the test set, in batches of at most ceil(batch / ranks) samples."""
        ...

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Return batches of `batch` samples of this rank's own, without end, from its step `step` on. Not collective.

        The rank visits all samples that it holds in an order of its own, then again in another.
        """
        ...

    def all_test_batches(self, batch: int) -> Iterator[Batch]:
        """Return the whole test set on this rank, in batches of at most `batch` samples. Not collective."""
        ...

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        ...


class InMemoryFeed:
    """Feed from a small data set, of which every rank holds a copy."""

    def __init__(
        self,
        data: Dataset,
        world: World,
        seed: int,
        observe: Observe | None = None,
        shuffle: ShuffleOptions = ShuffleOptions(),  # noqa: B008  frozen
    ) -> None:
        """Keep the data set. `observe` is called with the span of each shuffle and of each batch that is read."""
        self._data, self._world, self._seed, self._observe = data, world, seed, observe
        self._shuffle = shuffle
        self.samples, self.test_samples, self.classes = len(data.train), len(data.test), data.classes
        self.channels, self.fingerprint = data.train.inputs.shape[1], f"{self.samples} in memory"
        self.notes: tuple[str, ...] = ()
        self.labels_per_sample = 1

    def epoch(self, epoch: int, batch: int, done: int) -> Iterator[Batch]:
        """Yield this rank's share of each step."""
        with observed(self._observe, "shuffle", "shuffle"):
            order = epoch_order(self.samples, batch, self._seed, epoch, self._shuffle)
        for step in range(done, steps_of(self.samples, batch)):
            rows = torch.from_numpy(share(order, batch, step, self._world.rank, self._world.size))
            yield self._read(self._data.train, rows)

    def test_batches(self, batch: int) -> Iterator[Batch]:
        """Yield this rank's share of the test set."""
        for part in test_ranges(self.test_samples, batch, self._world.rank, self._world.size):
            yield self._read(self._data.test, slice(part.start, part.stop))

    def own_batches(self, batch: int, step: int) -> Iterator[Batch]:
        """Yield batches of this rank's own, from all samples."""
        numbers_of_all = np.arange(self.samples)

        def draw(epoch: int, _: int) -> NDArray[np.int64]:
            return worker_order(numbers_of_all, self._seed, self._world.rank, epoch)

        for _, numbers in own_numbers(draw, self.samples, batch, step):
            rows = torch.from_numpy(numbers)
            yield self._read(self._data.train, rows)

    def all_test_batches(self, batch: int) -> Iterator[Batch]:
        """Yield the whole test set."""
        for part in test_ranges(self.test_samples, batch, 0, 1):
            yield self._read(self._data.test, slice(part.start, part.stop))

    def blank(self, samples: int) -> torch.Tensor:
        """Return zeros with the shape and memory layout of the inputs of a batch."""
        return torch.zeros(samples, *self._data.train.inputs.shape[1:])

    def close(self) -> None:
        """Do nothing: there are no threads and no shared memory."""

    def _read(self, samples: Samples, rows: torch.Tensor | slice) -> Batch:
        with observed(self._observe, "read batch", "loading"):
            return samples.inputs[rows], samples.labels[rows]
