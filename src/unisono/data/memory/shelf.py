"""Where a rank lays a segment out for the others, sorted by who is to hold what; and how they get it.

On one node a shelf is memory that all ranks see: each copies what is for it straight out of the others' shelves.

    rank 0's shelf   | how many samples and bytes for 0, 1, 2, 3 | numbers | samples for 0 | for 1 | for 2 | for 3 |
    rank 2 copies                                                                                  ▲ this, from each

Between nodes what is laid out travels as messages. Rounds: 2 meetings on a node, 3 exchanges between nodes. Bytes that
each rank copies on a node: n / p in, n / p out.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.memory.segment import SLACK, Segment
from unisono.transports.windows import Window
from unisono.world import World

Bytes = NDArray[np.uint8]


class Shelf:
    """Room for the segments of the ranks of `world`, one at a time. Made, used and freed by all together."""

    def __init__(self, world: World, samples: int, nbytes: int) -> None:
        """Room for so many samples of so many bytes in all."""
        self._world, self.samples, self.nbytes = world, samples, nbytes
        heads = 16 * (world.size + 1)
        self._cuts = np.cumsum([heads, 4 * samples + -4 * samples % 8, nbytes])
        self._window = Window(world.comm, int(self._cuts[-1])) if world.nodes == 1 and world.size > 1 else None
        buffers = [np.empty(self._cuts[-1], np.uint8)] if self._window is None else self._window.buffers
        self._shelves = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        self._own = self._shelves[world.rank if self._window is not None else 0]

    def lay_out(self, segment: Segment, to: NDArray[np.integer]) -> None:
        """Sort a segment's samples by the ranks that are to hold them."""
        laid = segment.take(np.argsort(to, kind="stable"), self._parts(self._own)[2])
        heads, numbers, _ = self._parts(self._own)
        heads[0, 0] = 0
        np.cumsum(np.bincount(to, minlength=self._world.size), out=heads[0, 1:])
        heads[1] = heads[0] * laid.lengths[0] if laid.uniform else laid.offsets[heads[0]]
        numbers[: len(laid)] = laid.numbers

    def take(self, room: Bytes, lengths: NDArray[np.int32]) -> Segment:
        """What all ranks have laid out for this one, in `room` where it is large enough; `lengths` of all samples."""
        return self._by_messages(room, lengths) if self._window is None else self._copied(room, lengths)

    def free(self) -> None:
        """Give the memory back."""
        self._shelves, self._own = [], np.empty(0, np.uint8)
        if self._window is not None:
            self._window.free()

    def _copied(self, room: Bytes, lengths: NDArray[np.int32]) -> Segment:
        self._world.barrier()
        own, ranks = self._world.rank, self._world.size
        shelves = [self._parts(shelf) for shelf in self._shelves]
        ends = np.cumsum([heads[:, own + 1] - heads[:, own] for heads, _, _ in shelves], axis=0)
        numbers, data = _room(room, ends[-1])
        for rank in (*range(own, ranks), *range(own)):
            heads, given, samples = shelves[rank]
            (first, begin), (last, end) = heads[:, own], heads[:, own + 1]
            numbers[ends[rank, 0] - last + first : ends[rank, 0]] = given[first:last]
            data[ends[rank, 1] - end + begin : ends[rank, 1]] = samples[begin:end]
        self._world.barrier()  # from here on the shelves may be used again
        return Segment(numbers, data, lengths[numbers])

    def _by_messages(self, room: Bytes, lengths: NDArray[np.int32]) -> Segment:
        heads, given, samples = self._parts(self._own)
        sizes = torch.from_numpy(np.ascontiguousarray(np.diff(heads).T))
        ends = self._world.all_to_all(sizes).numpy().cumsum(axis=0)
        numbers, data = _room(room, ends[-1])
        for sends, places, comes, until in (
            (given, heads[0], numbers, ends[:, 0]),
            (samples, heads[1], data, ends[:, 1]),
        ):
            self._world.exchange(_cut(sends, places), _cut(comes, np.concatenate([[0], until])))
        return Segment(numbers, data, lengths[numbers])

    def _parts(self, shelf: Bytes) -> tuple[NDArray[np.int64], NDArray[np.int32], Bytes]:
        """Where each rank's samples begin, by samples and by bytes; the samples' numbers; the samples."""
        first, second, third = self._cuts
        heads = shelf[:first].view(np.int64).reshape(2, -1)
        return heads, shelf[first:second].view(np.int32), shelf[second:third]


def _room(room: Bytes, sizes: NDArray[np.int64]) -> tuple[NDArray[np.int32], Bytes]:
    samples, nbytes = sizes.tolist()
    if len(room) < nbytes:
        room = np.empty(int(SLACK * nbytes), np.uint8)
    return np.empty(samples, np.int32), room


def _cut(array: NDArray[np.generic], bounds: NDArray[np.int64]) -> list[torch.Tensor]:
    whole = torch.from_numpy(array)
    return [whole[first:last] for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
