"""Samples that a rank holds, side by side in its memory, with their numbers.

    numbers    |  free  | 17 4  52  | 8   33 | 21 90 6  |  free  |        a row each
    samples    |  free  | aaa b cc  | dd  e  | ff g hhh |  free  |        blocks (`blocks.py`)
    segments            0           1        2          3                 cuts: rows and blocks

Shared stores lie in memory that all ranks of a node map, so that each rank copies samples into the others' stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.pack.batches import EncodedSamples
from unisono.data.storage.blocks import BlockRun, Numbers, block_of, blocks_of
from unisono.data.storage.compaction import Counts, counts
from unisono.data.storage.free_memory import check_free_memory
from unisono.data.storage.partition import rows_for
from unisono.schedules.pieces import bounds
from unisono.transports.window import Window
from unisono.world import World

COPY_BYTES = 512 << 10
"""Approximate bytes copied at once for one rank: samples between them are for other ranks, and still in cache."""

Bytes = NDArray[np.uint8]

Lengths = NDArray[np.int32]
"""Bytes of every sample of the pack."""


class SampleBuffer(NamedTuple):
    """Memory for samples, and for their numbers."""

    numbers: NDArray[np.int32]
    blocks: Bytes
    """Samples as an array of shape (blocks, bytes of a block)."""


class SampleStore:
    """Samples of a rank. Creation, growth and freeing are collective over `world`."""

    def __init__(self, world: World, lengths: Lengths, capacity: tuple[int, int], shared: bool) -> None:
        """Allocate `capacity`, (samples, blocks), on each rank; `lengths` has the bytes of all samples of the pack.

        `shared` requires several ranks on one node.
        """
        self.world, self.lengths, self.shared = world, lengths, shared
        self.block = block_of(lengths)
        """Bytes of a block."""
        self.uniform = len(lengths) > 0 and bool((lengths == self.block).all())
        """True if each sample is one block."""
        self.capacity: Counts = np.array(capacity, np.int64)
        """Rows and blocks that are allocated."""
        self.cuts: Counts = np.zeros((1, 2), np.int64)
        """Row and block at which each segment begins and the last one ends, (segments + 1, 2)."""
        self.at_start = True
        """True if the segments lie at the beginning of the memory; otherwise they lie at its end."""
        self._begins = np.zeros(1, np.int64)
        self.buffers: list[SampleBuffer] = []
        """Memory of all ranks if the store is shared, otherwise of this rank alone."""
        self._open()

    def fill(self, numbers: NDArray[np.int32], stretches: Iterable[EncodedSamples], rows: NDArray[np.int64]) -> None:
        """Fill the store with these samples, given in order; segments begin, and the last one ends, at `rows`."""
        begins = self._ends(numbers, 0)
        self.own.numbers[: len(numbers)] = numbers
        memory, row = self.own.blocks.reshape(-1), 0
        for data, offsets in stretches:
            count = len(offsets) - 1
            at = (begins[row : row + count] * self.block).tolist()
            if self.uniform:
                memory[row * self.block : (row + count) * self.block] = data
            else:
                for begin, (start, stop) in zip(at, pairwise(offsets.tolist()), strict=True):
                    memory[begin : begin + stop - start] = data[start:stop]
            row += count
        self.set_segments(np.stack([rows, begins[rows]], axis=1), at_start=True)

    def set_segments(self, cuts: Counts, at_start: bool) -> None:
        """Declare the samples between `cuts`, at the beginning (`at_start`) or the end of the memory, as those held."""
        self.cuts, self.at_start = cuts, at_start
        if not self.uniform:
            self._begins = self._ends(self.numbers, int(cuts[0, 1]))

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Numbers of the samples held, row by row."""
        return self.own.numbers[self.cuts[0, 0] : self.cuts[-1, 0]]

    @property
    def nbytes(self) -> int:
        """Bytes of the samples held."""
        return int(self.lengths[self.numbers].sum(dtype=np.int64))

    def samples(self, rows: NDArray[np.integer]) -> list[Bytes]:
        """Return the bytes of the samples in these rows, as views that are valid until samples are moved or freed."""
        begins = (self.cuts[0, 1] + rows if self.uniform else self._begins[rows]) * self.block
        ends = begins + self.lengths[self.numbers[rows]]
        memory = self.own.blocks.reshape(-1)
        return [memory[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def counts(self, to: NDArray[np.integer]) -> Counts:
        """Return rows and blocks for each rank in each segment, (ranks, segments, 2); sample i goes to rank to[i]."""
        begins = None if self.uniform else self._begins
        return counts(to, self.cuts[:, 0] - self.cuts[0, 0], begins, self.world.size)

    def copy_segment(self, segment: int, to: NDArray[np.integer], buffers: list[SampleBuffer], begins: Counts) -> None:
        """Copy the samples of a segment that are for rank r to begins[r] (row and block) of buffers[r].

        Sample i of the segment is for rank to[i]; samples for one rank keep their order.
        """
        (first, begin), (last, end) = (self.cuts[segment : segment + 2]).tolist()
        first, last = first - int(self.cuts[0, 0]), last - int(self.cuts[0, 0])
        numbers, table, at = self.numbers[first:last], self.own.blocks[begin:end], begins.tolist()
        rows = rows_for(to, len(buffers))
        for buffer, own, (row, _) in zip(buffers, rows, at, strict=True):
            numbers.take(
                own, 0, buffer.numbers[row : row + len(own)], "clip"
            )  # clip: otherwise NumPy copies through a buffer
        turns = max(1, (end - begin) * self.block // (COPY_BYTES * len(buffers)))
        stretch = self._stretches(rows, first, last, begin)
        for turn in range(turns):
            for rank, buffer in enumerate(buffers):
                blocks = stretch(rank, *bounds(len(rows[rank]), turns, turn))
                block = at[rank][1]
                table.take(blocks, 0, buffer.blocks[block : block + len(blocks)], "clip")
                at[rank][1] += len(blocks)

    def grow(self, more: Counts) -> None:
        """Add `more` rows and blocks to the capacity; samples at its end move to the new end. Raises PackError."""
        check_free_memory(self.world, nbytes_of(self.capacity + more, self.block), self.shared)
        old, window = self.own, self._window
        (first, begin), (last, end) = self.cuts[0].tolist(), self.cuts[-1].tolist()
        self.capacity = self.capacity + more
        self._open()
        cuts = self.cuts if self.at_start else self.cuts + more
        self.own.numbers[cuts[0, 0] : cuts[-1, 0]] = old.numbers[first:last]
        self.own.blocks[cuts[0, 1] : cuts[-1, 1]] = old.blocks[begin:end]
        self.set_segments(cuts, self.at_start)
        del old
        if window is not None:
            window.free()

    def free(self) -> None:
        """Drop the samples and free their memory."""
        self.buffers, self.own = [], SampleBuffer(np.empty(0, np.int32), np.empty((0, self.block), np.uint8))
        self.set_segments(np.zeros((1, 2), np.int64), at_start=True)
        if self._window is not None:
            self._window.free()

    def _open(self) -> None:
        """Allocate memory for all rows and blocks of the capacity."""
        rows, blocks = self.capacity.tolist()
        nbytes = nbytes_of(self.capacity, self.block)
        begin = nbytes - blocks * self.block
        self._window = Window(self.world.comm, nbytes) if self.shared else None
        buffers = [np.empty(nbytes, np.uint8)] if self._window is None else self._window.buffers
        wholes = [np.frombuffer(buffer, np.uint8, nbytes) for buffer in buffers]
        shape = blocks, self.block
        self.buffers = [
            SampleBuffer(whole[: 4 * rows].view(np.int32), whole[begin:].reshape(shape)) for whole in wholes
        ]
        self.own = self.buffers[self.world.rank if self.shared else 0]

    def _ends(self, numbers: NDArray[np.int32], begin: int) -> NDArray[np.int64]:
        """Return the blocks at which these samples, side by side from `begin` on, begin and the last one ends."""
        ends = np.empty(len(numbers) + 1, np.int64)
        ends[0] = begin
        np.cumsum(blocks_of(self.lengths[numbers], self.block), out=ends[1:])
        ends[1:] += begin
        return ends

    def _stretches(self, rows: list[Numbers], first: int, last: int, begin: int) -> Callable[[int, int, int], Numbers]:
        """Return a function (rank, one, other) for the blocks of rows[rank][one:other], counted from `begin`."""
        if self.uniform:
            return lambda rank, one, other: rows[rank][one:other]
        begins, sizes = self._begins[first:last] - begin, np.diff(self._begins[first : last + 1])
        runs = [BlockRun(begins[own], sizes[own]) for own in rows]
        ramp = np.arange(max(int(run.ends[-1]) if len(run.ends) else 0 for run in runs))
        return lambda rank, one, other: runs[rank].stretch(one, other, ramp)


def nbytes_of(capacity: Counts, block: int) -> int:
    """Return the bytes that `capacity`, in rows and blocks of `block` bytes, takes."""
    rows, blocks = capacity.tolist()
    return int(4 * rows + -4 * rows % 64 + blocks * block)
