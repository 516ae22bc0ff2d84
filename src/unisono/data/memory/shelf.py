"""The samples that a rank holds, side by side in its memory, and which they are.

    numbers    |  free  | 17 4  52  | 8   33 | 21 90 6  |  free  |        a row each
    samples    |  free  | aaa b cc  | dd  e  | ff g hhh |  free  |        blocks (`blocks.py`)
    segments            0           1        2          3                 cuts: rows and blocks

Shelves that the ranks of a node share lie in memory that all of them see, so that each puts samples on the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.memory.blocks import Numbers, Run, block_of, blocks_of
from unisono.data.memory.dealing import rows_for
from unisono.data.memory.room import check_room
from unisono.data.memory.sliding import Counts, counts
from unisono.data.pack.batches import Samples
from unisono.schedules.pieces import bounds
from unisono.transports.window import Window
from unisono.world import World

PART = 512 << 10
"""Bytes for one rank that are copied at once, about: what lies between in memory is for others, and still in cache."""

Bytes = NDArray[np.uint8]

Lengths = NDArray[np.int32]
"""Bytes of every sample there is."""


class Place(NamedTuple):
    """Memory for samples, and for their numbers."""

    numbers: NDArray[np.int32]
    blocks: Bytes
    """(blocks, bytes of a block)."""


class Shelf:
    """The samples of a rank. Made, grown and freed by all ranks of `world` together."""

    def __init__(self, world: World, lengths: Lengths, room: tuple[int, int], shared: bool) -> None:
        """Room for so many samples in so many blocks on each rank; `lengths` are of all samples that there are.

        `shared` asks for ranks that sit on one node, and are several.
        """
        self.world, self.lengths, self.shared = world, lengths, shared
        self.block = block_of(lengths)
        """Bytes of a block."""
        self.alike = len(lengths) > 0 and bool((lengths == self.block).all())
        """Whether each sample is a block."""
        self.room: Counts = np.array(room, np.int64)
        """Rows and blocks that there are."""
        self.cuts: Counts = np.zeros((1, 2), np.int64)
        """Where each segment begins, and the last one ends: rows and blocks."""
        self.low = True
        """Whether the segments lie at the beginning of the room; else they lie at its end."""
        self._begins = np.zeros(1, np.int64)
        self.places: list[Place] = []
        """Of all ranks, where they are shared; else of this rank."""
        self._open()

    def fill(self, numbers: NDArray[np.int32], stretches: Iterable[Samples], rows: NDArray[np.int64]) -> None:
        """Hold these samples, which come in order; segments begin, and the last one ends, at these rows."""
        begins = self._ends(numbers, 0)
        self.own.numbers[: len(numbers)] = numbers
        memory, row = self.own.blocks.reshape(-1), 0
        for data, offsets in stretches:
            count = len(offsets) - 1
            at = (begins[row : row + count] * self.block).tolist()
            if self.alike:
                memory[row * self.block : (row + count) * self.block] = data
            else:
                for begin, (start, stop) in zip(at, pairwise(offsets.tolist()), strict=True):
                    memory[begin : begin + stop - start] = data[start:stop]
            row += count
        self.hold(np.stack([rows, begins[rows]], axis=1), low=True)

    def hold(self, cuts: Counts, low: bool) -> None:
        """From here on hold what lies between these cuts, at one end of the room."""
        self.cuts, self.low = cuts, low
        if not self.alike:
            self._begins = self._ends(self.numbers, int(cuts[0, 1]))

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Which samples there are, row by row."""
        return self.own.numbers[self.cuts[0, 0] : self.cuts[-1, 0]]

    @property
    def nbytes(self) -> int:
        """Bytes of the samples."""
        return int(self.lengths[self.numbers].sum(dtype=np.int64))

    def samples(self, rows: NDArray[np.integer]) -> list[Bytes]:
        """The bytes of samples, where they lie: not longer there when the samples move, or go."""
        begins = (self.cuts[0, 1] + rows if self.alike else self._begins[rows]) * self.block
        ends = begins + self.lengths[self.numbers[rows]]
        memory = self.own.blocks.reshape(-1)
        return [memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def counts(self, to: NDArray[np.integer]) -> Counts:
        """Rows and blocks that go to each rank in each segment, (ranks, segments, 2), where sample i goes to to[i]."""
        begins = None if self.alike else self._begins
        return counts(to, self.cuts[:, 0] - self.cuts[0, 0], begins, self.world.size)

    def lay(self, segment: int, to: NDArray[np.integer], places: list[Place], begins: Counts) -> None:
        """Copy the samples of a segment that are for rank r to begins[r] (row and block) of places[r].

        Sample i of the segment is for rank to[i]; those for one rank stay in the order in which they lie.
        """
        (first, begin), (last, end) = (self.cuts[segment : segment + 2]).tolist()
        first, last = first - int(self.cuts[0, 0]), last - int(self.cuts[0, 0])
        numbers, table, at = self.numbers[first:last], self.own.blocks[begin:end], begins.tolist()
        rows = rows_for(to, len(places))
        for place, own, (row, _) in zip(places, rows, at, strict=True):
            numbers.take(own, 0, place.numbers[row : row + len(own)], "clip")  # clip: else by way of a buffer
        turns = max(1, (end - begin) * self.block // (PART * len(places)))
        stretch = self._stretches(rows, first, last, begin)
        for turn in range(turns):
            for rank, place in enumerate(places):
                blocks = stretch(rank, *bounds(len(rows[rank]), turns, turn))
                block = at[rank][1]
                table.take(blocks, 0, place.blocks[block : block + len(blocks)], "clip")
                at[rank][1] += len(blocks)

    def grow(self, more: Counts) -> None:
        """Make room for so many more rows and blocks; what lies at the end lies there again."""
        check_room(self.world, nbytes_of(self.room + more, self.block), self.shared)
        old, window = self.own, self._window
        (first, begin), (last, end) = self.cuts[0].tolist(), self.cuts[-1].tolist()
        self.room = self.room + more
        self._open()
        cuts = self.cuts if self.low else self.cuts + more
        self.own.numbers[cuts[0, 0] : cuts[-1, 0]] = old.numbers[first:last]
        self.own.blocks[cuts[0, 1] : cuts[-1, 1]] = old.blocks[begin:end]
        self.hold(cuts, self.low)
        del old
        if window is not None:
            window.free()

    def free(self) -> None:
        """Forget the samples and give their memory back."""
        self.places, self.own = [], Place(np.empty(0, np.int32), np.empty((0, self.block), np.uint8))
        self.hold(np.zeros((1, 2), np.int64), low=True)
        if self._window is not None:
            self._window.free()

    def _open(self) -> None:
        """Memory for all that there is room for."""
        rows, blocks = self.room.tolist()
        nbytes = nbytes_of(self.room, self.block)
        begin = nbytes - blocks * self.block
        self._window = Window(self.world.comm, nbytes) if self.shared else None
        buffers = [np.empty(nbytes, np.uint8)] if self._window is None else self._window.buffers
        wholes = [np.frombuffer(buffer, np.uint8, nbytes) for buffer in buffers]
        shape = blocks, self.block
        self.places = [Place(whole[: 4 * rows].view(np.int32), whole[begin:].reshape(shape)) for whole in wholes]
        self.own = self.places[self.world.rank if self.shared else 0]

    def _ends(self, numbers: NDArray[np.int32], begin: int) -> NDArray[np.int64]:
        """Where samples of these numbers begin and the last one ends, in blocks, side by side from `begin` on."""
        ends = np.empty(len(numbers) + 1, np.int64)
        ends[0] = begin
        np.cumsum(blocks_of(self.lengths[numbers], self.block), out=ends[1:])
        ends[1:] += begin
        return ends

    def _stretches(self, rows: list[Numbers], first: int, last: int, begin: int) -> Callable[[int, int, int], Numbers]:
        """Gives the blocks of stretches of each rank's rows: both are counted from where a segment begins, as told."""
        if self.alike:
            return lambda rank, one, other: rows[rank][one:other]
        begins, sizes = self._begins[first:last] - begin, np.diff(self._begins[first : last + 1])
        runs = [Run(begins[own], sizes[own]) for own in rows]
        ramp = np.arange(max(int(run.ends[-1]) if len(run.ends) else 0 for run in runs))
        return lambda rank, one, other: runs[rank].stretch(one, other, ramp)


def nbytes_of(room: Counts, block: int) -> int:
    """Bytes that so many rows and blocks take."""
    rows, blocks = room.tolist()
    return int(4 * rows + -4 * rows % 64 + blocks * block)
