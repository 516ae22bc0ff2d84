"""Distributed in-memory data: the three calls of DIMD (section 4.1), for a loop that samples at random.

    data = partitioned_load(pack, world)     i)    each rank loads a part of the pack into memory
    inputs, labels = data.random_batch(32)   ii)   random samples of this rank's part, from memory
    data.shuffle()                           iii)  samples move between the ranks (Algorithm 2)

8 samples on 4 ranks, with 1 group and with 2; each group holds all samples, and shuffles by itself:

    groups = 1    rank 0: 0 1      rank 1: 2 3      rank 2: 4 5      rank 3: 6 7
    shuffled              0 2              1 4              5 7              3 6
    groups = 2    rank 0: 0 1 2 3  rank 1: 4 5 6 7  rank 2: 0 1 2 3  rank 3: 4 5 6 7

Bytes of a shuffle of n bytes in groups of m ranks: n / m on each rank, less the n / m^2 that stay. Draws of different
ranks are independent, as in DIMD: an epoch may use a sample twice or not at all. `Loader` uses each once.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.feed import check_on_all
from unisono.data.kinds import make_transform
from unisono.data.loader import check_number
from unisono.data.loading import Batch, Prefetcher, Running
from unisono.data.options import DataOptions
from unisono.data.order import permutation, random_draw
from unisono.data.pack import TRAIN_SPLITS, check_installed, split_folder
from unisono.data.storage import AUTO, FILES, STREAMED, read_storage
from unisono.errors import PackError, UsageError
from unisono.tables import parse
from unisono.world import World


def partitioned_load(
    pack: str | Path, world: World, *, groups: int | None = None, seed: int = 0, **data: Any
) -> InMemoryPartition:
    """Load a training set into the memory of the ranks, a part into each (DIMD 4.1, call i). Collective.

    `groups` is the number of copies over all ranks, each in a group of ranks; as many as ranks give each rank a copy of
    its own. None takes as many as fit into the free memory of the nodes. The other arguments are those of `Loader`,
    but `shuffle`.
    Raises PackError on every rank if the pack cannot be read or does not fit, or the groups cannot be formed;
    UsageError if a key or value is none of `[data]`, or not one for this call.
    """
    check_installed()
    place = {"storage": AUTO} if groups is None else {"groups": groups}
    given = {"threads": 1, **place, **data, "pack": str(pack)}
    options = parse(DataOptions, given, "partitioned_load", UsageError)
    if options.shuffle != "epoch":
        raise UsageError(f'shuffle = "{options.shuffle}": samples move when shuffle() is called; take Loader')
    from unisono.data.pack.index import read_index  # noqa: PLC0415  of the extra `data`, as the next
    from unisono.data.storage.choose import resolve_storage  # noqa: PLC0415

    seed = check_number("seed", seed, most=(1 << 64) - 1)
    index = world.call_on_all(lambda: read_index(split_folder(Path(options.pack), TRAIN_SPLITS)))
    check_on_all(index.folder, index.fingerprint, world)
    transform = make_transform(index, options)
    resolved, reason = resolve_storage(options, index, world)
    if resolved.storage in (STREAMED, FILES) and not reason:
        raise UsageError(f'storage = "{resolved.storage}": partitioned_load takes a pack into memory; take Loader')
    if resolved.storage in (STREAMED, FILES):
        raise PackError(f"{index.folder} does not fit: {reason}; take Loader, which streams it, or more nodes")
    storage = read_storage(resolved, index, world)
    storage.give_stretches()
    return InMemoryPartition(Prefetcher(index, storage, transform, max(1, options.threads)), seed)


class InMemoryPartition(Running):
    """Part of a training set in this rank's memory. Made by `partitioned_load`, by all ranks together."""

    def __init__(self, loader: Prefetcher, seed: int) -> None:
        """Take the threads that decode from a storage."""
        self._storage, self._loader, self._seed = loader.sampler, loader, seed
        self._batch, self._draws, self._shuffles = 0, 0, 0
        self.samples = loader.samples
        """Samples of the training set, over all ranks."""

    @property
    def numbers(self) -> NDArray[np.integer]:
        """Numbers of the samples in this rank's memory, ascending; they change with each shuffle."""
        return self._storage.numbers

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds."""
        return self._storage.nbytes

    def random_batch(self, samples: int) -> Batch:
        """Return so many random samples of this rank's memory, none twice, and their labels (DIMD 4.1, call ii).

        Not collective. A function of the seed, the rank and the calls before. Batches of one length are prepared in
        advance; a batch's memory is used again by the next call. Raises UsageError for more samples than are held, and
        after `close`.
        """
        if self._running is None or samples != self._batch:
            self._check_open()
            held = len(self.numbers)
            if not 0 < samples <= held:
                raise UsageError(
                    f"rank {self._storage.world.rank} holds {held} samples, of which a batch of {samples} was asked; "
                    f"take 1 to {held}, or load more groups"
                )
            self._stop()
            self._running, self._batch = self._batches(samples), samples
        batch = next(self._running)
        self._draws += 1
        return batch

    def shuffle(self) -> None:
        """Give each rank other samples, in a random permutation of each group's (DIMD 4.1, call iii). Collective.

        A function of the seed and the number of shuffles. Nothing moves where each node holds a copy.
        """
        self._check_open()
        self._stop()
        self._shuffles += 1
        self._storage.epoch(permutation(self.samples, self._seed, self._shuffles), self.samples)

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._closed = True
        self._stop()
        self._loader.close()

    def _batches(self, samples: int) -> Generator[Batch]:
        """Return random batches without end. The crops of each draw of each rank are others."""
        held, rank = self._storage.numbers.astype(np.int64), self._storage.world.rank
        numbers = (random_draw(held, self._seed, rank, draw, samples) for draw in count(self._draws))
        return self._loader.batches(numbers, self._seed, count((rank + 1) << 40 | self._draws))
