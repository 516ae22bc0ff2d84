"""Plan of the memory for gradients: the place of each, and the buckets that are sent (swCaffe section 5.1: packing).

    parameters  w0 (2)  w1 (3)  w2 (9)  w3 (1)          become ready as 3, 1, 2, 0; a bucket holds 4 at most
    memory      │ w3 w1 f f │ w2 │ w2 │ w2 f │ w0 f │    one block for each dtype, and number of parts
    buckets     └─── 0 ─────┘└ 1 ┘└ 2 ┘└─ 3 ─┘└─ 4 ─┘    what is too large for one is cut

Behind the gradients that end in a bucket, each has one flag. Its sum shows whether any rank had a gradient.

Buckets may be smaller at both ends, since the first and the last are waited for: nothing is sent before the first is
full, and the last is full when all is computed. With an end ratio of 4, a bucket holds 4 at most, the first and the
last 1, and those between at most twice as much as all before, and twice as much as all behind:

    equal         │    4    │    4    │    4    │    4    │    4    │
    end ratio 4   │ 1 │  2  │    4    │    4    │    4    │  3   │ 1 │ 1 │
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from unisono.step.layout import Bucket

ALIGNMENT = 64
"""Alignment of each gradient in bytes: a cache line, which also suits vector instructions."""

GROWTH = 3
"""Ratio of all buckets up to the next one to those before it, at most, where the first is smaller than others; from the
end alike."""

MemoryKind = tuple[torch.dtype, int]
"""Memory of parameters of one dtype that are split into the same number of parts."""


class BucketSlice(NamedTuple):
    """Bucket in the memory of one dtype, in elements. The gradients of `parameters` lie in it, whole or in part."""

    dtype: torch.dtype
    start: int
    stop: int
    parameters: tuple[int, ...]
    flags: int
    """First element of the flags, one for each of `ends`."""
    ends: tuple[int, ...]
    """Parameters whose last element is in this bucket."""
    parts: int = 1
    """Number of parts that its parameters are split into, one on each rank of a model group; 1: they are whole."""

    @property
    def memory(self) -> MemoryKind:
        return self.dtype, self.parts

    @property
    def nbytes(self) -> int:
        """Number of bytes that are sent."""
        return (self.stop - self.start) * self.dtype.itemsize


class MemoryLayout(NamedTuple):
    """Places of all gradients, and the buckets in the order in which they fill."""

    starts: tuple[int, ...]
    """First element of each parameter, in its memory."""
    lengths: Mapping[MemoryKind, int]
    buckets: tuple[BucketSlice, ...]


def plan_memory(
    parameters: Sequence[tuple[int, torch.dtype]],
    order: Sequence[int],
    largest: int,
    counts: Sequence[int] = (),
    end_ratio: int = 1,
) -> MemoryLayout:
    """Return the layout of parameters, given as (length, dtype), whose gradients become ready in `order`.

    A bucket is closed before its gradients take more than `largest` bytes, at both ends of a memory `largest /
    end_ratio`. A larger gradient is cut in proportion to what buckets may hold, into equal parts where that is the
    same; each is a bucket of its own. `counts` has the number of parts that each parameter is split into over ranks;
    those with different numbers share no bucket. Empty: none is split.
    """
    kinds = memory_kinds(parameters, counts)
    memories = {kind: _PlannedMemory(*kind, largest, end_ratio) for kind in dict.fromkeys(kinds)}
    for (length, _), kind in zip(parameters, kinds, strict=True):
        memories[kind].left += memories[kind].aligned(length)
    starts = [0] * len(parameters)
    buckets: list[BucketSlice] = []
    for index in order:
        starts[index] = memories[kinds[index]].add(index, parameters[index][0], buckets)
    for memory in memories.values():
        memory.close(buckets)
    place = {index: position for position, index in enumerate(order)}
    buckets.sort(key=lambda bucket: max(place[index] for index in bucket.parameters))
    return MemoryLayout(tuple(starts), {kind: memory.stop for kind, memory in memories.items()}, tuple(buckets))


class _PlannedMemory:
    """Memory of one kind while it is being planned."""

    def __init__(self, dtype: torch.dtype, split: int, largest: int, end_ratio: int) -> None:
        self.dtype, self.split = dtype, split
        self.step = ALIGNMENT // dtype.itemsize
        self.largest, self.smallest = (
            max(self.step, nbytes // ALIGNMENT * self.step) for nbytes in (largest, largest // end_ratio)
        )
        self.start = self.stop = 0  # the open bucket's
        self.members: list[int] = []
        self.placed = 0
        """Elements of gradients in closed buckets."""
        self.left = 0
        """Elements of all other gradients."""

    def add(self, index: int, length: int, buckets: list[BucketSlice]) -> int:
        """Place a parameter. Return its first element."""
        padded = self.aligned(length)
        if self.members and self.stop - self.start + padded > self._limit():
            self.close(buckets)
        begin = self.stop
        ends = [padded] if self.members else self._cut(padded)
        for end in ends[:-1]:  # all but the last, which has the flags
            self._end(begin + end, (index,), (), buckets)
        self.stop = begin + padded
        self.members.append(index)
        if len(ends) > 1:
            self.close(buckets)
        return begin

    def close(self, buckets: list[BucketSlice]) -> None:
        """Close the open bucket, with its flags at the end."""
        if self.members:
            self._end(self.stop, tuple(self.members), tuple(self.members), buckets)
            self.members = []

    def _end(self, flags: int, parameters: tuple[int, ...], ends: tuple[int, ...], buckets: list[BucketSlice]) -> None:
        """End the open bucket with the flags of those that end in it."""
        stop = flags + self.aligned(len(ends))
        buckets.append(BucketSlice(self.dtype, self.start, stop, parameters, flags, ends, self.split))
        self.placed, self.left = self.placed + flags - self.start, self.left - flags + self.start
        self.start = self.stop = stop

    def _limit(self, more: int = 0) -> int:
        """Return the elements of gradients that the bucket may hold which begins `more` elements behind the start of
        the open one."""
        before, after = self.placed + more, self.left - more
        near = min((GROWTH - 1) * before, (GROWTH - 1) * after // GROWTH)
        return min(self.largest, max(self.smallest, near // self.step * self.step))

    def _cut(self, padded: int) -> list[int]:
        """Return the ends of the parts of a gradient that begins a bucket."""
        limits = [0]
        while len(limits) == 1 or limits[-1] < padded:
            limits.append(limits[-1] + self._limit(limits[-1]))
        return [self.aligned(padded * limit // limits[-1]) for limit in limits[1:]]

    def aligned(self, length: int) -> int:
        """Return the elements of as many whole cache lines as `length` elements need."""
        return -(-length // self.step) * self.step


def buckets_of(
    sizes: Sequence[int],
    largest: int,
    end_ratio: int = 1,
    counts: Sequence[int] = (),
    holders: Mapping[int, tuple[tuple[int, ...], ...]] = MappingProxyType({}),
) -> list[Bucket]:
    """Return the buckets of float32 parameters, or their parts, of these bytes, whose gradients come in reverse order.

    `holders` has the ranks that hold the same part, for each part, by the number of parts.
    """
    lengths = [(-(-nbytes // torch.float32.itemsize), torch.float32) for nbytes in sizes]
    planned = plan_memory(lengths, range(len(sizes))[::-1], largest, counts, end_ratio).buckets
    return [Bucket(bucket.nbytes, bucket.parameters, groups=holders.get(bucket.parts, ())) for bucket in planned]


def required_elements(
    parameters: Sequence[tuple[int, torch.dtype]], counts: Sequence[int] = ()
) -> dict[MemoryKind, int]:
    """Return the elements of each memory that suffice for parameters of these (length, dtype) in any layout."""
    elements: dict[MemoryKind, int] = {}
    for (length, dtype), kind in zip(parameters, memory_kinds(parameters, counts), strict=True):
        step = ALIGNMENT // dtype.itemsize  # the padding of the gradient, and a line of flags at the most
        elements[kind] = elements.get(kind, 0) + length + 2 * step
    return elements


def memory_kinds(parameters: Sequence[tuple[int, torch.dtype]], counts: Sequence[int] = ()) -> list[MemoryKind]:
    """Return the memory that each parameter lies in."""
    return [(dtype, counts[index] if counts else 1) for index, (_, dtype) in enumerate(parameters)]
