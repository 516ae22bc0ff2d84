"""Partitioned storage: each rank holds a partition, all ranks (or each group) hold one copy; the three calls of DIMD.

read     a stretch each, from few stripes
epoch    shuffle, so that each rank holds what it will see; nothing is sent if each rank holds it already
samples  any of those, from memory
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, share, worker_order
from unisono.data.pack.index import Index
from unisono.data.pack.stripe_file import read_stretch
from unisono.data.storage import Storage, StorageOptions
from unisono.data.storage.free_memory import check_free_memory, has_free_memory
from unisono.data.storage.ownership import Owners, check_groups, form_groups, initial_owners, owners_in_epoch
from unisono.data.storage.sample_store import SampleStore, block_of, blocks_of, nbytes_of
from unisono.data.storage.shuffle import capacity, shuffle
from unisono.errors import PackError
from unisono.schedules.pieces import bounds
from unisono.world import World

SEGMENT_BYTES = 64 << 20
"""Approximate bytes that a rank exchanges at once."""


def read(index: Index, options: StorageOptions, world: World) -> PartitionedStorage:
    """Return the pack in the memory of the ranks that share each batch, with a copy in each of their groups."""
    return PartitionedStorage(index, world, options.groups)


class PartitionPlan(NamedTuple):
    """Stretches of a pack that the members of a group read."""

    begins: list[int]
    """First sample of each member, and the number of samples."""
    ends: Numbers
    """Number of blocks up to the beginning of each sample, and of all."""
    samples: int
    """Samples of the largest partition."""
    blocks: int
    """Blocks of the largest partition."""
    segments: int


def plan_partition(lengths: NDArray[np.int32], members: int, segment_bytes: int = SEGMENT_BYTES) -> PartitionPlan:
    """Return the plan for samples of these lengths in bytes: as many samples for each member, up to one."""
    begins = [bounds(len(lengths), members, member)[0] for member in range(members)] + [len(lengths)]
    block = block_of(lengths)
    ends = np.concatenate([[0], blocks_of(lengths, block).cumsum(dtype=np.int64)])
    samples, blocks = int(np.diff(begins).max()), int(np.diff(ends[begins]).max())
    return PartitionPlan(begins, ends, samples, blocks, max(1, -(-blocks * block // segment_bytes)))


def partition_bytes(lengths: NDArray[np.int32], members: int) -> int:
    """Return the most bytes that a rank needs for its partition and its shuffle."""
    return nbytes_of(np.array(_capacity(plan_partition(lengths, members))), block_of(lengths))


def _capacity(plan: PartitionPlan) -> tuple[int, int]:
    """Return the rows and blocks of a store in which a segment is free."""
    return capacity(plan.samples, plan.blocks, -(-plan.samples // plan.segments))


class PartitionedStorage(Storage):
    """Samples of a pack in the memory of the ranks of `world`, in `groups` that hold a copy each."""

    def __init__(self, index: Index, world: World, groups: int = 1, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read the pack. Collective.

        Raises PackError on every rank if a rank cannot read its partition or it does not fit into its node.
        """
        super().__init__(len(index), world)
        self.members, self._index = check_groups(len(index), world.size, groups), index
        self.groups = form_groups(world.placement, groups)
        self._member_of_rank = np.array(self.groups.member_of_rank)
        self._group = world if groups == 1 else world.split(self.groups.group_of_rank[world.rank])
        plan = plan_partition(index.length, self.members, segment_bytes)
        self._store = self._new_store(plan)
        first, last = plan.begins[self._group.rank : self._group.rank + 2]
        begin, end = plan.ends[[first, last]]
        wanted = begin + (end - begin) * np.arange(plan.segments + 1) // plan.segments
        rows = np.searchsorted(plan.ends, wanted).clip(first, last) - first
        rows[-1] = last - first
        held = np.arange(first, last, dtype=np.int32)
        world.call_on_all(lambda: self._store.fill(held, read_stretch(index, first, last), rows))
        self._owners: Owners = initial_owners(len(index), self.members)
        self._index_rows(np.arange(first, last))

    def epoch(self, order: Numbers, batch: int, done: int = 0) -> None:  # noqa: ARG002  all move together
        """Shuffle, so that each rank holds what it will see of `order`; the same samples for any `done`. Collective."""
        owners = owners_in_epoch(order, batch, self._member_of_rank)
        if np.array_equal(owners, self._owners):  # on all ranks alike, so none waits for another
            return
        shuffle(self._store, owners)
        self._owners = owners
        self._index_rows(np.flatnonzero(owners == self._group.rank))

    def own(self, order: Numbers) -> Numbers:
        """Shuffle once, so that each rank has a random share of the classes, and return what this rank holds."""
        self.epoch(order, len(order))
        self._own = np.sort(share(order, len(order), 0, self._world.rank, self._world.size))
        return self._own

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> Numbers:  # noqa: ARG002  in memory
        """Return a permutation of this rank's own samples."""
        return worker_order(self._own, seed, self._world.rank, epoch)

    def samples(self, numbers: Numbers) -> list[NDArray[np.uint8]]:
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

    def _new_store(self, plan: PartitionPlan) -> SampleStore:
        """Return a store for the largest partition of a rank: shared if memory allows, for a faster shuffle."""
        group, lengths = self._group, self._index.length
        rows_and_blocks = _capacity(plan)
        needed = nbytes_of(np.array(rows_and_blocks), block_of(lengths))
        check_free_memory(self._world, needed)  # memory that is not shared needs a segment besides, too
        shareable = group.nodes == 1 and group.size > 1
        if has_free_memory(self._world, needed if shareable else 0, shared=True) and shareable:
            return SampleStore(group, lengths, rows_and_blocks, shared=True)
        return SampleStore(group, lengths, capacity(plan.samples, plan.blocks, 0), shared=False)

    def _index_rows(self, held: Numbers) -> None:
        """Store the row of each sample that this rank holds; `held` has their numbers in ascending order."""
        rows = np.empty(len(self._index), np.int32)
        rows[self._store.numbers] = np.arange(len(held), dtype=np.int32)
        self._numbers, self._rows = held.astype(np.int32), rows[held]
