"""Storage of the pack in each node, once, shared by its ranks; a shuffle is then a permuted index (DIMD 4.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers
from unisono.data.pack.index import Index
from unisono.data.storage import Storage, StorageOptions
from unisono.data.storage.node_memory import SharedStretches
from unisono.schedules.pieces import bounds
from unisono.world import World


def read(index: Index, options: StorageOptions, world: World) -> ReplicatedStorage:  # noqa: ARG001  as all of them
    """Return a copy of the pack in each node, which all ranks there share."""
    return ReplicatedStorage(index, world)


class ReplicatedStorage(Storage):
    """Copy of a pack in the memory of each node of `world`."""

    def __init__(self, index: Index, world: World) -> None:
        """Read the pack. Collective. Raises PackError on every rank, as `PartitionedStorage` does."""
        super().__init__(len(index), world)
        ranks = world.node_world().size
        firsts, stops = np.array([bounds(len(index), ranks, member) for member in range(ranks)]).T
        self._memory = SharedStretches(index, firsts, stops, world)

    def samples(self, numbers: Numbers) -> list[NDArray[np.uint8]]:
        """Return the bytes of any samples, as views of the shared memory."""
        return self._memory.samples(numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds for its node."""
        return self._memory.nbytes

    def close(self) -> None:
        """Free the memory. Collective."""
        self._memory.close()
