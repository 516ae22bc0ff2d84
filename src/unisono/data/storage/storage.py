"""Contract of a storage: samples of a pack, in memory or read ahead, and the value that names a storage.

    read ──▶ order, epoch 0 ── samples, samples, ... ──▶ order, epoch 1 ── samples, ... ──▶ close      ranks in step
    read ──▶ own ── own_epoch 0 ── samples, ... ── own_epoch 1 ── samples, ... ────────────▶ close      out of step

`read`, `epoch`, `own` and `close` are collective, the others never are: between two of them a rank reads alone. Ranks
of an asynchronous rule share no epochs. Each has samples of its own, which stay where they are from `own` to `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.data.pack.index import Index
from unisono.data.shuffle_options import ShuffleOptions
from unisono.data.storage import STORAGES
from unisono.errors import PackError
from unisono.world import World

BUFFER_BYTES = 1 << 30
"""Bytes of the shuffle buffer of a streamed pack, over all ranks, unless another number is given."""


@dataclass(frozen=True)
class StorageOptions:
    """Place of the samples of a pack."""

    name: str = "partitioned"
    """Name in `STORAGES`, or AUTO for a choice by the memory there is (`choose.py`)."""
    groups: int = 1
    """Copies of the pack over all ranks, one in each group of ranks, if it is partitioned."""
    buffer: int = BUFFER_BYTES
    """Bytes of the shuffle buffer over all ranks, if the pack is streamed."""
    cache: int = 0
    """Bytes of the pack that each node keeps in memory, if it is streamed."""


class SampleReader(Protocol):
    """Samples that one rank reads by itself."""

    def samples(self, numbers: NDArray[np.int64]) -> Sequence[NDArray[np.uint8]]:
        """Return the bytes of the samples with these numbers, as views valid until the next epoch.

        Raises PackError for samples that this rank does not hold.
        """
        ...


class Storage(SampleReader, Protocol):
    """Samples of a pack for the ranks of a world."""

    @property
    def order_name(self) -> str:
        """Property that orders depend on, beside the arguments of `order`; empty if they are full permutations."""
        ...

    def order(self, seed: int, epoch: int, batch: int, shuffle: ShuffleOptions) -> NDArray[np.int64]:
        """Return the order of an epoch in steps of `batch` samples: each once, the same on any number of ranks."""
        ...

    def epoch(self, order: NDArray[np.int64], batch: int, done: int = 0) -> None:
        """Give each rank what it will see of `order` in steps of `batch` samples (`order.share`). Collective.

        The first `done` steps are left out: a run is resumed.
        """
        ...

    def own(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the samples that are this rank's own, ascending; no epoch follows. Collective.

        All ranks together own every sample of `order`, a permutation of all.
        """
        ...

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> NDArray[np.int64]:
        """Return the order of this rank's own samples in an epoch of its own, which it begins at step `done`."""
        ...

    @property
    def numbers(self) -> NDArray[np.integer]:
        """Numbers of the samples that this rank can read, ascending."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds."""
        ...

    def close(self) -> None:
        """Free the memory. Collective."""
        ...


def read_storage(options: StorageOptions, index: Index, world: World) -> Storage:
    """Return the storage of a pack. Collective. Raises PackError on every rank.

    The ranks of `world` share each batch.
    """
    made: Storage = STORAGES.load(options.name, PackError)(index, options, world)
    return made
