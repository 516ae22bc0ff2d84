"""Samples that a rank holds, side by side in its memory, with their numbers.

    numbers    |  free  | 17 4  52  | 8   33 | 21 90 6  |  free  |        a row each
    samples    |  free  | aaa b cc  | dd  e  | ff g hhh |  free  |        blocks
    segments            0           1        2          3                 cuts: rows and blocks

Shared stores lie in memory that all ranks of a node map, so that each rank copies samples into the others' stores.
Samples lie in whole blocks, so that samples in any order are copied by taking rows of a table:

    blocks of 4 bytes      aaaa aa.. bbb. cccc cccc c...          samples of 6, 3 and 9 bytes begin at 0, 2, 3
    samples 2 and 0        blocks 3 4 5 0 1    ──take──▶          cccc cccc c... aaaa aa..

If all samples have one length, a sample is one block. Otherwise blocks are so small that padding at the ends of samples
is 1/28 of their bytes (4 bytes a sample if they have less than 100). They are no smaller, since each block number takes
time too: about 8 ns, in which 60 bytes are copied.

Rows are found by the rank that they go to:

    to   1 0 2 1 0        rows for 0: 1 4        for 1: 0 3        for 2: 2

For few ranks one pass over all rows for each rank is fastest (0.8 ns a row and rank). For many ranks a sort is fastest
(7 ns a row, if ranks are one-byte integers).
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.kinds import Bytes
from unisono.data.order import joined_ranges
from unisono.data.pack.stripe import EncodedSamples, views
from unisono.data.storage.free_memory import check_free_memory
from unisono.schedules.pieces import bounds
from unisono.transports.window import Window, allocate_window
from unisono.world import World

COPY_BYTES = 512 << 10
"""Approximate bytes copied at once for one rank: samples between them are for other ranks, and still in cache."""

Counts = NDArray[np.int64]
"""Numbers of rows and blocks, in the last axis."""


class SampleBuffer(NamedTuple):
    """Memory for samples, and for their numbers."""

    numbers: NDArray[np.int32]
    blocks: Bytes
    """Samples as an array of shape (blocks, bytes of a block)."""


HEADER_BYTES = 64
"""Bytes before the samples of a file: its rows and blocks, the row and block at which samples begin, the row at which
they end, each int64; the last is 0 while samples move."""


def map_file(path: Path, nbytes: int = 0) -> Bytes:
    """Return the content of a file; with `nbytes`, of a new one. Raises OSError, as where memory is short."""
    with path.open("x+b" if nbytes else "r+b") as file:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class SampleStore:
    """Samples of a rank. Creation, growth and freeing are collective over `world`."""

    def __init__(
        self, world: World, lengths: NDArray[np.int32], capacity: Counts, shared: bool, names: Path | None = None
    ) -> None:
        """Allocate `capacity`, (samples, blocks), on each rank; `lengths` has the bytes of all samples of the pack.

        `shared` requires several ranks on one node; the store is not shared where its shared memory is short. With
        `names`, the samples are left to others at the end of this process, in a file whose path begins so
        (`handing_over.py`).
        """
        self.world, self.lengths, self.shared, self._names = world, lengths, shared, names
        self.block = block_of(lengths)
        """Bytes of a block."""
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
        for stretch in stretches:
            offsets = (begins[row : row + len(stretch.offsets)] * self.block).tolist()
            row += len(stretch.offsets) - 1
            if offsets[-1] - offsets[0] == len(stretch.data):  # nothing is padded
                memory[offsets[0] : offsets[-1]] = stretch.data
                continue
            for begin, sample in zip(offsets[:-1], stretch.each(), strict=True):
                memory[begin : begin + len(sample)] = sample
        self.set_segments(np.stack([rows, begins[rows]], axis=1), at_start=True)

    def set_segments(self, cuts: Counts, at_start: bool) -> None:
        """Declare the samples between `cuts`, at the beginning (`at_start`) or the end of the memory, as those held."""
        self.cuts, self.at_start = cuts, at_start
        self._begins = self._ends(self.numbers, int(cuts[0, 1]))
        self._header[:4] = *self.capacity, *cuts[0]
        self._header[4] = cuts[-1, 0]

    def move(self) -> None:
        """Declare that samples are about to move, and are not whole until `set_segments`."""
        self._header[4] = 0

    @property
    def numbers(self) -> NDArray[np.int32]:
        """Numbers of the samples held, row by row."""
        return self.own.numbers[self.cuts[0, 0] : self.cuts[-1, 0]]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Row at which each segment begins and the last one ends, from 0 on."""
        rows: NDArray[np.int64] = self.cuts[:, 0] - self.cuts[0, 0]
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of the samples held."""
        return int(self.lengths[self.numbers].sum(dtype=np.int64))

    def samples(self, rows: NDArray[np.integer]) -> list[Bytes]:
        """Return the bytes of the samples in these rows, as views that are valid until samples are moved or freed."""
        return views(self.own.blocks.reshape(-1), self._begins[rows] * self.block, self.lengths[self.numbers[rows]])

    def counts(self, to: NDArray[np.integer]) -> Counts:
        """Return rows and blocks for each rank in each segment, (ranks, segments, 2); sample i goes to rank to[i]."""
        counts = np.empty((self.world.size, len(self.cuts) - 1, 2), np.int64)
        for segment, (first, last) in enumerate(pairwise(self.rows.tolist())):
            sizes = np.diff(self._begins[first : last + 1])
            counts[:, segment, 0] = np.bincount(to[first:last], minlength=self.world.size)
            counts[:, segment, 1] = np.bincount(to[first:last], sizes, self.world.size)
        return counts

    def copy_segment(self, segment: int, to: NDArray[np.integer], buffers: list[SampleBuffer], begins: Counts) -> None:
        """Copy the samples of a segment that are for rank r to begins[r] (row and block) of buffers[r].

        Sample i of the segment is for rank to[i]; samples for one rank keep their order.
        """
        first, last = self.rows[segment : segment + 2].tolist()
        begin, end = self.cuts[segment : segment + 2, 1].tolist()
        numbers, table = self.numbers[first:last], self.own.blocks[begin:end]
        starts, sizes = self._begins[first:last] - begin, np.diff(self._begins[first : last + 1])
        rows = rows_for(to, len(buffers))
        blocks = [joined_ranges(starts[picked], sizes[picked]) for picked in rows]
        for buffer, picked, row in zip(buffers, rows, begins[:, 0].tolist(), strict=True):
            # clip: otherwise NumPy copies through a buffer
            numbers.take(picked, 0, buffer.numbers[row : row + len(picked)], "clip")
        turns = max(1, (end - begin) * self.block // (COPY_BYTES * len(buffers)))
        for turn in range(turns):
            for buffer, picked, block in zip(buffers, blocks, begins[:, 1].tolist(), strict=True):
                low, high = bounds(len(picked), turns, turn)
                table.take(picked[low:high], 0, buffer.blocks[block + low : block + high], "clip")

    def grow(self, more: Counts) -> None:
        """Add `more` rows and blocks to the capacity, before samples move; those at its end move to the new end.

        Raises PackError.
        """
        check_free_memory(self.world, nbytes_of(self.capacity + more, self.block), bool(self._names))
        old, window, path = self.own, self._window, self._path
        (first, begin), (last, end) = self.cuts[0].tolist(), self.cuts[-1].tolist()
        self.capacity = self.capacity + more
        self._open()
        cuts = self.cuts if self.at_start else self.cuts + more
        self.own.numbers[cuts[0, 0] : cuts[-1, 0]] = old.numbers[first:last]
        self.own.blocks[cuts[0, 1] : cuts[-1, 1]] = old.blocks[begin:end]
        self.set_segments(cuts, self.at_start)
        self.move()
        del old
        if window is not None:
            window.free()
        if path is not None:
            path.unlink(missing_ok=True)  # another storage of this process may have taken it over

    def free(self) -> None:
        """Drop the samples and free their memory, unless others are to have them."""
        self.buffers, self.own = [], SampleBuffer(np.empty(0, np.int32), np.empty((0, self.block), np.uint8))
        self._header = np.zeros(5, np.int64)
        self.set_segments(np.zeros((1, 2), np.int64), at_start=True)
        if self._window is not None:
            self._window.free()

    def _open(self) -> None:
        """Allocate memory for all rows and blocks of the capacity."""
        nbytes = nbytes_of(self.capacity, self.block)
        self._window: Window | None = None
        self._path: Path | None = None
        self._header = np.zeros(5, np.int64)
        if self._names is not None:
            self.buffers = self._open_files(self._names, nbytes)
        elif self.shared and (window := allocate_window(self.world.comm, nbytes)) is not None:
            self._window = window
            self.buffers = [self._cut(np.frombuffer(each, np.uint8, nbytes), self.capacity) for each in window.buffers]
        else:  # samples are sent
            self.shared = False
            self.buffers = [self._cut(np.empty(nbytes, np.uint8), self.capacity)]
        self.own = self.buffers[self.world.rank if self.shared else 0]

    def _open_files(self, names: Path, nbytes: int) -> list[SampleBuffer]:
        """Return memory in a new file; if the store is shared, that of all ranks, of which each has its capacity."""
        path = self._path = names.with_name(f"{names.name}-{secrets.token_hex(4)}")
        memory = self.world.call_on_all(lambda: map_file(path, HEADER_BYTES + nbytes))
        self._header = memory[:HEADER_BYTES].view(np.int64)
        files = self.world.all_gather_object((path, self.capacity)) if self.shared else [(path, self.capacity)]
        return [self._cut((memory if peer == path else map_file(peer))[HEADER_BYTES:], size) for peer, size in files]

    def _cut(self, memory: Bytes, capacity: Counts) -> SampleBuffer:
        """Return memory as that of so many rows and blocks: numbers at its beginning, blocks at its end."""
        rows, blocks = capacity.tolist()
        begin = len(memory) - blocks * self.block
        return SampleBuffer(memory[: 4 * rows].view(np.int32), memory[begin:].reshape(blocks, self.block))

    def _ends(self, numbers: NDArray[np.int32], begin: int) -> NDArray[np.int64]:
        """Return the blocks at which these samples, side by side from `begin` on, begin and the last one ends."""
        ends = np.full(len(numbers) + 1, begin, np.int64)
        ends[1:] += blocks_of(self.lengths[numbers], self.block).cumsum(dtype=np.int64)
        return ends


def nbytes_of(capacity: Counts, block: int) -> int:
    """Return the bytes that `capacity`, in rows and blocks of `block` bytes, takes."""
    rows, blocks = capacity.tolist()
    return int(4 * rows + -4 * rows % 64 + blocks * block)


MAX_RANKS_BY_PASSES = 8
"""Largest number of ranks for which there is one pass for each rank."""


def rows_for(to: NDArray[np.integer], ranks: int) -> list[NDArray[np.int64]]:
    """Return the rows that go to each of `ranks` ranks, in ascending order."""
    if ranks <= MAX_RANKS_BY_PASSES:
        return [np.flatnonzero(to == rank) for rank in range(ranks)]
    return np.split(np.argsort(to, kind="stable"), np.bincount(to, minlength=ranks).cumsum()[:-1])


BLOCKS_PER_SAMPLE = 14
"""Number of blocks of a sample of mean length, if lengths differ."""

MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 8, 512
"""Bytes of a block, if lengths differ: a multiple of the first, up to the second."""


def block_of(lengths: NDArray[np.int32]) -> int:
    """Return the bytes of a block, for samples of these lengths in bytes."""
    if not len(lengths):
        return MIN_BLOCK_BYTES
    if lengths.min() == lengths.max() > 0:
        return int(lengths[0])
    wanted = int(lengths.mean()) // BLOCKS_PER_SAMPLE // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES
    return min(MAX_BLOCK_BYTES, max(MIN_BLOCK_BYTES, wanted))


def blocks_of(lengths: NDArray[np.int32], block: int) -> NDArray[np.int32]:
    """Return the number of blocks of each sample, for lengths and `block` in bytes."""
    return -(-lengths // np.int32(block))
