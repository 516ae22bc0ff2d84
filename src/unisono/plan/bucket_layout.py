"""Plan of the memory for gradients: the place of each, and the buckets that are sent (swCaffe section 5.1: packing).

    parameters  w0 (2)  w1 (3)  w2 (9)  w3 (1)          become ready as 3, 1, 2, 0; a bucket holds 4 at most
    memory      │ w3 w1 f f │ w2 │ w2 │ w2 f │ w0 f │    one block for each dtype, and number of parts
    buckets     └─── 0 ─────┘└ 1 ┘└ 2 ┘└─ 3 ─┘└─ 4 ─┘    what is too large for one is cut

Behind the gradients that end in a bucket, each has one flag. Its sum shows whether any rank had a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Alignment of each gradient in bytes: a cache line, which also suits vector instructions."""


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
        """Memory that the bucket lies in."""
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
    """Number of elements in each memory."""
    buckets: tuple[BucketSlice, ...]


def plan_memory(
    parameters: Sequence[tuple[int, torch.dtype]],
    order: Sequence[int],
    largest: int,
    counts: Sequence[int] = (),
) -> MemoryLayout:
    """Return the layout of parameters, given as (length, dtype), whose gradients become ready in `order`.

    A bucket is closed before its gradients take more than `largest` bytes. A larger gradient is cut into equal parts,
    each a bucket of its own. `counts` has the number of parts that each parameter is split into over ranks; those with
    different numbers share no bucket. Empty: none is split.
    """
    kinds = memory_kinds(parameters, counts)
    memories = {kind: _PlannedMemory(*kind, largest) for kind in dict.fromkeys(kinds)}
    starts = [0] * len(parameters)
    buckets: list[BucketSlice] = []
    for number in order:
        starts[number] = memories[kinds[number]].add(number, parameters[number][0], buckets)
    for memory in memories.values():
        memory.close(buckets)
    place = {number: at for at, number in enumerate(order)}
    buckets.sort(key=lambda bucket: max(place[number] for number in bucket.parameters))
    return MemoryLayout(tuple(starts), {kind: memory.stop for kind, memory in memories.items()}, tuple(buckets))


class _PlannedMemory:
    """Memory of one kind while it is being planned."""

    def __init__(self, dtype: torch.dtype, split: int, largest: int) -> None:
        self.dtype, self.split = dtype, split
        self.step = ALIGNMENT // dtype.itemsize
        self.max_elements = max(self.step, largest // ALIGNMENT * self.step)
        self.start = self.stop = 0  # the open bucket's
        self.members: list[int] = []

    def add(self, number: int, length: int, buckets: list[BucketSlice]) -> int:
        """Place a parameter. Return its first element."""
        padded = self._aligned(length)
        if self.members and self.stop - self.start + padded > self.max_elements:
            self.close(buckets)
        begin = self.stop
        parts = -(-padded // self.max_elements) or 1
        for part in range(1, parts):  # all but the last, which may have others behind it
            self.stop = begin + self._aligned(padded * part // parts)
            buckets.append(BucketSlice(self.dtype, self.start, self.stop, (number,), self.stop, (), self.split))
            self.start = self.stop
        self.stop = begin + padded
        self.members.append(number)
        if parts > 1:
            self.close(buckets)
        return begin

    def close(self, buckets: list[BucketSlice]) -> None:
        """Close the open bucket, with its flags at the end."""
        if self.members:
            flags, ends = self.stop, tuple(self.members)
            self.stop += self._aligned(len(ends))
            buckets.append(BucketSlice(self.dtype, self.start, self.stop, ends, flags, ends, self.split))
            self.start, self.members = self.stop, []

    def _aligned(self, length: int) -> int:
        return -(-length // self.step) * self.step


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
    return [(dtype, counts[number] if counts else 1) for number, (_, dtype) in enumerate(parameters)]
