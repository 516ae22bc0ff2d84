"""Partitioned storage: each rank holds a partition, all ranks (or each group) hold one copy; the three calls of DIMD.

read     a stretch each, from few stripes
epoch    shuffle, so that each rank holds what it will see
samples  any of those, from memory
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import share
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.data.storage.blocks import block_of, blocks_of
from unisono.data.storage.compaction import capacity
from unisono.data.storage.free_memory import check_free_memory, has_free_memory
from unisono.data.storage.ownership import check_groups, owners_in_epoch
from unisono.data.storage.sample_store import SampleStore, nbytes_of
from unisono.data.storage.shuffle import shuffle
from unisono.data.storage.storage import StorageOptions
from unisono.errors import PackError
from unisono.schedules.pieces import bounds
from unisono.world import World

SEGMENT_BYTES = 64 << 20
"""Approximate bytes that a rank exchanges at once."""


def read(index: Index, options: StorageOptions, world: World, everyone: World) -> PartitionedStorage:  # noqa: ARG001
    """Return the pack in the memory of the ranks that share each batch, with a copy in each of their groups."""
    return PartitionedStorage(index, world, options.groups)


class PartitionedStorage:
    """Samples of a pack in the memory of the ranks of `world`, in `groups` that hold a copy each."""

    def __init__(self, index: Index, world: World, groups: int = 1, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read the pack. Collective.

        Raises PackError on every rank if a rank cannot read its partition or it does not fit into its node.
        """
        self.members = check_groups(len(index), world.size, groups)
        self._index, self._world = index, world
        self._group = world if groups == 1 else world.split(world.rank // self.members)
        begins = [bounds(len(index), self.members, member)[0] for member in range(self.members)] + [len(index)]
        block = block_of(index.length)
        ends = np.concatenate([[0], blocks_of(index.length, block).cumsum(dtype=np.int64)])
        samples, blocks = int(np.diff(begins).max()), int(np.diff(ends[begins]).max())
        segments = max(1, -(-blocks * block // segment_bytes))
        self._store = self._new_store(samples, blocks, segments)
        first, last = begins[self._group.rank : self._group.rank + 2]
        wanted = ends[first] + (ends[last] - ends[first]) * np.arange(segments + 1) // segments
        rows = np.searchsorted(ends, wanted).clip(first, last) - first
        rows[-1] = last - first
        held = np.arange(first, last, dtype=np.int32)
        world.call_on_all(lambda: self._store.fill(held, read_stretch(index, first, last), rows))
        self._index_rows(np.arange(first, last))

    def epoch(self, order: NDArray[np.int64], batch: int) -> None:
        """Shuffle, so that each rank holds what it will see of `order` in steps of `batch` samples. Collective."""
        owners = owners_in_epoch(order, batch, self._world.size, self.members)
        shuffle(self._store, owners)
        self._index_rows(np.flatnonzero(owners == self._group.rank))

    def own(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shuffle once, so that each rank has a random share of the classes, and return what this rank holds."""
        self.epoch(order, len(order))
        return np.sort(share(order, len(order), 0, self._world.rank, self._world.size))

    def samples(self, numbers: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return the bytes of this rank's samples, as views valid until the next epoch. Raises PackError for others."""
        wanted = numbers.astype(np.int32)
        found = np.searchsorted(self._numbers, wanted).clip(max=max(0, len(self._numbers) - 1))
        if len(wanted) and not (len(self._numbers) and np.array_equal(self._numbers[found], wanted)):
            raise PackError(
                f"rank {self._world.rank} does not hold all of the samples {wanted[:5].tolist()}...: another epoch has "
                "begun"
            )
        return self._store.samples(self._rows[found])

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Numbers of the samples that this rank holds, in ascending order."""
        return self._numbers

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds."""
        return self._store.nbytes

    def close(self) -> None:
        """Free the memory of all samples. Collective."""
        self._store.free()
        self._index_rows(np.empty(0, np.int64))
        if self._group is not self._world:
            self._group.free()

    def _new_store(self, samples: int, blocks: int, segments: int) -> SampleStore:
        """Return a store for the largest partition of a rank: shared if memory allows, for a faster shuffle."""
        group, lengths = self._group, self._index.length
        rows_and_blocks = capacity(samples, blocks, -(-samples // segments))
        needed = nbytes_of(np.array(rows_and_blocks), block_of(lengths))
        check_free_memory(self._world, needed)  # memory that is not shared needs a segment besides, too
        shareable = group.nodes == 1 and group.size > 1
        if has_free_memory(self._world, needed if shareable else 0, shared=True) and shareable:
            return SampleStore(group, lengths, rows_and_blocks, shared=True)
        return SampleStore(group, lengths, capacity(samples, blocks, 0), shared=False)

    def _index_rows(self, held: NDArray[np.int64]) -> None:
        """Store the row of each sample that this rank holds; `held` has their numbers in ascending order."""
        rows = np.empty(len(self._index), np.int32)
        rows[self._store.numbers] = np.arange(len(held), dtype=np.int32)
        self._numbers, self._rows = held.astype(np.int32), rows[held]
