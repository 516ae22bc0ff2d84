"""Storages: places of a pack's samples, in memory, in its stripes or in files. Each has one file, and one row.

    read ──▶ order, epoch 0 ── samples, samples, ... ──▶ order, epoch 1 ── samples, ... ──▶ close      ranks in step
    read ──▶ own ── own_epoch 0 ── samples, ... ── own_epoch 1 ── samples, ... ────────────▶ close      out of step
    read ──▶ give_stretches ── samples, samples, ... ──────────────────────────────────────▶ close      test set

`read`, `epoch`, `own`, `give_stretches` and `close` are collective, the others never are: between two of them a rank
reads alone. Ranks of an asynchronous rule share no epochs. Each has samples of its own, which stay where they are from
`own` to `close`. What a storage does not define is `Sampler`'s (`data/order.py`): the order of samples that every rank
can read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, Sampler
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
    """Return the storage of a pack. Collective. Raises PackError on every rank."""
    made: Storage = STORAGES.load(options.storage, PackError)(index, world, options)
    return made
