"""Storages: places of a pack's samples, in memory, in its stripes or in files. Each has one file, and one row.

    read ──▶ order, epoch 0 ── samples, samples, ... ──▶ order, epoch 1 ── samples, ... ──▶ close      ranks in step
    read ──▶ own ── own_epoch 0 ── samples, ... ── own_epoch 1 ── samples, ... ────────────▶ close      out of step

`read`, `epoch`, `own` and `close` are collective, the others never are: between two of them a rank reads alone. Ranks
of an asynchronous rule share no epochs. Each has samples of its own, which stay where they are from `own` to `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, ShuffleOptions, epoch_order, worker_order
from unisono.errors import PackError
from unisono.registry import Registry

if TYPE_CHECKING:
    from unisono.data.options import DataOptions
    from unisono.data.pack.index import Index
    from unisono.world import World

PARTITIONED, REPLICATED, STREAMED, FILES = "partitioned", "replicated", "streamed", "files"

STORAGES = Registry(
    "storage",
    {
        PARTITIONED: "unisono.data.storage.partitioned:PartitionedStorage",
        REPLICATED: "unisono.data.storage.replicated:ReplicatedStorage",
        STREAMED: "unisono.data.storage.streamed:StreamedStorage",
        FILES: "unisono.data.storage.files:FilesStorage",
    },
)
"""Storages by name. Each is a `Storage`, made from (index, world, options)."""

AUTO = "auto"
"""Name in recipes for the storage that is chosen from the memory there is (`choose.py`)."""


class Sampler:
    """Order in which the ranks of a world visit samples. Here each rank can read all, so that none ever moves."""

    order_name = ""
    """Property that orders depend on, beside the arguments of `order`; empty if they are full permutations."""
    virtual = 0
    """Number of virtual ranks that share each batch; 0: the ranks do."""
    note = ""
    """Line for the start of a run; empty if there is nothing to say."""

    def __init__(self, samples: int, world: World) -> None:
        """Keep the number of samples, over all ranks of `world`, which share each batch."""
        self._count, self.world = samples, world
        self._own: Numbers | None = None

    @property
    def numbers(self) -> NDArray[np.integer]:
        """Numbers of the samples that this rank can read, ascending."""
        return np.arange(self._count)

    def order(self, seed: int, epoch: int, batch: int, shuffle: ShuffleOptions) -> Numbers:
        """Return the order of an epoch in steps of `batch` samples: each once, the same on any number of ranks."""
        return epoch_order(self._count, batch, seed, epoch, shuffle)

    def epoch(self, order: Numbers, batch: int, done: int = 0) -> None:
        """Give each rank what it will see of `order` in steps of `batch` samples (`order.share`). Collective.

        The first `done` steps are left out: a run is resumed.
        """

    def give_stretches(self) -> None:
        """Give each rank a stretch of the samples, which it will see in turn. Collective."""

    def own(self, order: Numbers) -> Numbers:
        """Return the numbers of the samples that are this rank's own, ascending; no epoch follows. Collective.

        All ranks together own every sample of `order`, a permutation of all.
        """
        return np.arange(len(order))

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> Numbers:  # noqa: ARG002  in memory
        """Return the order of this rank's own samples in an epoch of its own, which it begins at step `done`."""
        own = np.arange(self._count) if self._own is None else self._own
        return worker_order(own, seed, self.world.rank, epoch)


class Storage(Sampler, ABC):
    """Samples of a pack for the ranks of a world."""

    @abstractmethod
    def samples(self, numbers: Numbers) -> Sequence[NDArray[np.uint8]]:
        """Return the bytes of the samples with these numbers, as views valid until the next epoch.

        Raises PackError for samples that this rank does not hold.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Collective."""


def read_storage(options: DataOptions, index: Index, world: World) -> Storage:
    """Return the storage of a pack. Collective. Raises PackError on every rank.

    The ranks of `world` share each batch.
    """
    made: Storage = STORAGES.load(options.storage, PackError)(index, world, options)
    return made
