"""Each rank holds a share of a pack, all ranks (or each group of them) together hold it once: DIMD's three calls.

load     a stretch each, from few stripes
epoch    shuffle, so that each rank holds what it will see
samples  any of those, from memory
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.data.memory.holding import check_groups, in_epoch
from unisono.data.memory.room import check_room
from unisono.data.memory.segment import Segment
from unisono.data.memory.shelf import Shelf
from unisono.data.memory.shuffle import shuffle
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.errors import PackError
from unisono.schedules.pieces import bounds
from unisono.world import World

SEGMENT_BYTES = 64 << 20
"""What is exchanged at once by a rank, about."""


class Partitioned:
    """The samples of a pack in the memory of the ranks of `world`, in `groups` that hold a copy each."""

    def __init__(self, index: Index, world: World, groups: int = 1, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read the pack, all ranks together.

        Raises PackError on every rank, where a rank cannot read its share or it does not fit into its node.
        """
        self.members = check_groups(len(index), world.size, groups)
        self._index, self._world = index, world
        self._group = world if groups == 1 else world.split(world.rank // self.members)
        begins = [bounds(len(index), self.members, member)[0] for member in range(self.members)]
        ends = np.concatenate([[0], index.length.cumsum(dtype=np.int64)])
        largest = int(np.diff(ends[[*begins, len(index)]]).max())
        first, last = bounds(len(index), self.members, self._group.rank)
        count = max(1, -(-largest // segment_bytes))
        wanted = ends[first] + (ends[last] - ends[first]) * np.arange(count + 1) // count
        cuts = np.searchsorted(ends, wanted).clip(first, last)
        check_room(world, int(ends[last] - ends[first]) + largest // count)
        check_room(world, largest // count, shared=True)  # the shelf
        self._segments = world.on_all(
            lambda: [Segment.of(int(begin), read_stretch(index, int(begin), int(end))) for begin, end in pairwise(cuts)]
        )
        self._shelf: Shelf | None = None
        self._find()

    def epoch(self, order: NDArray[np.int64], batch: int) -> None:
        """Shuffle: from here on each rank holds what it will see of `order` in steps of `batch` samples."""
        holders = in_epoch(order, batch, self._world.size, self.members)
        self._shelf = shuffle(self._group, self._segments, holders, self._index.length, self._shelf)
        self._find()

    def samples(self, numbers: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The bytes of samples that this rank holds. Raises PackError for others."""
        wanted = numbers.astype(np.int32)
        found = np.searchsorted(self._numbers, wanted).clip(max=max(0, len(self._numbers) - 1))
        if len(wanted) and not (len(self._numbers) and np.array_equal(self._numbers[found], wanted)):
            raise PackError(
                f"rank {self._world.rank} does not hold all of the samples {wanted[:5].tolist()}...: another epoch has "
                "begun"
            )
        places = self._rows[found]
        which = np.searchsorted(self._begins, places, side="right") - 1
        return [
            self._segments[segment].sample(row)
            for segment, row in zip(which.tolist(), (places - self._begins[which]).tolist(), strict=True)
        ]

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The samples that this rank holds, in ascending order."""
        return self._numbers

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds."""
        return sum(segment.nbytes for segment in self._segments)

    def close(self) -> None:
        """Forget all samples."""
        self._segments = []
        self._find()
        if self._shelf is not None:
            self._shelf.free()
        if self._group is not self._world:
            self._group.free()

    def _find(self) -> None:
        """Note where each number is."""
        held = [segment.numbers for segment in self._segments]
        numbers = np.concatenate([np.empty(0, np.int32), *held])
        self._rows = np.argsort(numbers).astype(np.int32)
        self._numbers = numbers[self._rows]
        self._begins = np.concatenate([[0], np.cumsum([len(each) for each in held])[:-1]]).astype(np.int64)
