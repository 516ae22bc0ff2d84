"""Where each gradient lies, and what travels together: a plan (swCaffe section 5.1: packing).

    parameters  w0 (2)  w1 (3)  w2 (9)  w3 (1)          become ready as 3, 1, 2, 0; a bucket holds 4 at most
    memory      │ w3 w1 f f │ w2 │ w2 │ w2 f │ w0 f │    one stretch for each dtype
    buckets     └─── 0 ─────┘└ 1 ┘└ 2 ┘└─ 3 ─┘└─ 4 ─┘    what is too large for one is cut

Behind the gradients that end in a bucket lies a flag for each: its sum says whether any rank had a gradient at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Bytes at whose multiples each gradient begins: a cache line, and what vector instructions like."""


class Stretch(NamedTuple):
    """A bucket in the memory of a dtype, in elements. Those that `parameters` names lie in it, whole or in part."""

    dtype: torch.dtype
    start: int
    stop: int
    parameters: tuple[int, ...]
    flags: int
    """Where the flags begin: one for each of `ends`."""
    ends: tuple[int, ...]
    """The parameters whose last element lies here."""

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return (self.stop - self.start) * self.dtype.itemsize


class MemoryLayout(NamedTuple):
    """The places of all gradients, and the buckets in the order in which they fill."""

    starts: tuple[int, ...]
    """Of each parameter, in the memory of its dtype, in elements."""
    lengths: Mapping[torch.dtype, int]
    """Elements of the memory of each dtype."""
    stretches: tuple[Stretch, ...]


def plan_memory(parameters: Sequence[tuple[int, torch.dtype]], order: Sequence[int], largest: int) -> MemoryLayout:
    """The layout of parameters of these (length, dtype), which become ready in `order`.

    A bucket is closed before the gradients in it take more than `largest` bytes; a gradient above that is cut into
    equal parts, each a bucket of its own.
    """
    lines = {dtype: _Line(dtype, largest) for dtype in dict.fromkeys(dtype for _, dtype in parameters)}
    starts = [0] * len(parameters)
    buckets: list[Stretch] = []
    for number in order:
        length, dtype = parameters[number]
        starts[number] = lines[dtype].add(number, length, buckets)
    for line in lines.values():
        line.close(buckets)
    place = {number: at for at, number in enumerate(order)}
    buckets.sort(key=lambda bucket: max(place[number] for number in bucket.parameters))
    return MemoryLayout(tuple(starts), {dtype: line.stop for dtype, line in lines.items()}, tuple(buckets))


class _Line:
    """The memory of one dtype while it is being planned."""

    def __init__(self, dtype: torch.dtype, largest: int) -> None:
        self.dtype = dtype
        self.step = ALIGNMENT // dtype.itemsize
        self.most = max(self.step, largest // ALIGNMENT * self.step)
        self.start = self.stop = 0  # the open bucket's
        self.members: list[int] = []

    def add(self, number: int, length: int, buckets: list[Stretch]) -> int:
        """Place a parameter; where it begins."""
        padded = self._aligned(length)
        if self.members and self.stop - self.start + padded > self.most:
            self.close(buckets)
        begin = self.stop
        parts = -(-padded // self.most) or 1
        for part in range(1, parts):  # all but the last, which may have others behind it
            self.stop = begin + self._aligned(padded * part // parts)
            buckets.append(Stretch(self.dtype, self.start, self.stop, (number,), self.stop, ()))
            self.start = self.stop
        self.stop = begin + padded
        self.members.append(number)
        if parts > 1:
            self.close(buckets)
        return begin

    def close(self, buckets: list[Stretch]) -> None:
        """End the open bucket with its flags."""
        if self.members:
            flags, ends = self.stop, tuple(self.members)
            self.stop += self._aligned(len(ends))
            buckets.append(Stretch(self.dtype, self.start, self.stop, ends, flags, ends))
            self.start, self.members = self.stop, []

    def _aligned(self, length: int) -> int:
        return -(-length // self.step) * self.step


def room_for(parameters: Sequence[tuple[int, torch.dtype]]) -> dict[torch.dtype, int]:
    """Elements of each dtype that suffice for parameters of these (length, dtype) in any layout."""
    room: dict[torch.dtype, int] = {}
    for length, dtype in parameters:
        step = ALIGNMENT // dtype.itemsize  # the padding of the gradient, and a line of flags at the most
        room[dtype] = room.get(dtype, 0) + length + 2 * step
    return room
