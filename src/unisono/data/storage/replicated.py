"""Storage of the pack in each node, once, shared by its ranks; a shuffle is then a permuted index (DIMD 4.1).

    node 0   rank 0 reads 0 1 2 3 4, rank 1 reads 5 6 7 8 9; both see all

Bytes read by each rank: those of the pack, divided by the ranks of its node.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import epoch_order, worker_order
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.data.shuffle_options import ShuffleOptions
from unisono.data.storage.free_memory import check_free_memory
from unisono.data.storage.ownership import initial_owners
from unisono.data.storage.storage import StorageOptions
from unisono.schedules.pieces import bounds
from unisono.transports.window import Window
from unisono.world import World


def read(index: Index, options: StorageOptions, world: World) -> ReplicatedStorage:  # noqa: ARG001  as all of them
    """Return a copy of the pack in each node, which all ranks there share."""
    return ReplicatedStorage(index, world)


class ReplicatedStorage:
    """Copy of a pack in the memory of each node of `world`."""

    def __init__(self, index: Index, world: World) -> None:
        """Read the pack. Collective. Raises PackError on every rank, as `PartitionedStorage` does."""
        node = world.node_world()
        self._owners = initial_owners(len(index), node.size)
        begins = np.array([bounds(len(index), node.size, member)[0] for member in range(node.size)])
        ends = np.concatenate([[0], index.length.cumsum(dtype=np.int64)])
        first, last = bounds(len(index), node.size, node.rank)
        own = int(ends[last] - ends[first])
        check_free_memory(world, own, shared=True)
        self._window = Window(node.comm, own)
        self._parts = [np.frombuffer(buffer, np.uint8) for buffer in self._window.buffers]
        self._offsets = ends - ends[begins][np.append(self._owners, node.size - 1)]
        self._length = index.length

        def read() -> None:
            at = 0
            for data, _ in read_stretch(index, first, last):
                self._parts[node.rank][at : at + len(data)] = data
                at += len(data)

        self._world = world
        world.call_on_all(read)
        self._window.sync()
        node.comm.Barrier()
        self._window.sync()

    order_name = ""

    def order(self, seed: int, epoch: int, batch: int, shuffle: ShuffleOptions) -> NDArray[np.int64]:
        """Return a full permutation, or one in which parts of a batch keep their samples."""
        return epoch_order(len(self._length), batch, seed, epoch, shuffle)

    def epoch(self, order: NDArray[np.int64], batch: int, done: int = 0) -> None:
        """Do nothing: every rank can read all samples in the memory of its node."""

    def own(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return all numbers: every rank can read all samples in the memory of its node."""
        return np.arange(len(order))

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> NDArray[np.int64]:  # noqa: ARG002  in memory
        """Return a permutation of all samples, another than on other ranks."""
        return worker_order(np.arange(len(self._length)), seed, self._world.rank, epoch)

    def samples(self, numbers: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return the bytes of any samples, as views of the shared memory."""
        begins = self._offsets[numbers]
        ends = begins + self._length[numbers]
        return [
            self._parts[part][begin:end]
            for part, begin, end in zip(self._owners[numbers].tolist(), begins.tolist(), ends.tolist(), strict=True)
        ]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Numbers of all samples."""
        return np.arange(len(self._length))

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds for its node."""
        return self._window.nbytes

    def close(self) -> None:
        """Free the memory. Collective."""
        self._parts = []
        self._window.free()
