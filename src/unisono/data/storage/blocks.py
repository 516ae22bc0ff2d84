"""Samples stored in whole blocks, so that samples in any order are copied by taking rows of a table.

    blocks of 4 bytes      aaaa aa.. bbb. cccc cccc c...          samples of 6, 3 and 9 bytes begin at 0, 2, 3
    samples 2 and 0        blocks 3 4 5 0 1    ──take──▶          cccc cccc c... aaaa aa..

If all samples have one length, a sample is one block. Otherwise blocks are so small that padding at the ends of samples
is 1/28 of their bytes (4 bytes a sample if they have less than 100). They are no smaller, since each block number takes
time too: about 8 ns, in which 60 bytes are copied.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

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
    return min(
        MAX_BLOCK_BYTES,
        max(MIN_BLOCK_BYTES, int(lengths.mean()) // BLOCKS_PER_SAMPLE // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES),
    )


def blocks_of(lengths: NDArray[np.int32], block: int) -> NDArray[np.int32]:
    """Return the number of blocks of each sample, for lengths and `block` in bytes."""
    return -(-lengths // np.int32(block))


class BlockRun:
    """Blocks of samples in order, a stretch of samples at a time: sample i has sizes[i] blocks from begins[i] on.

    >>> BlockRun(np.array([3, 0]), np.array([3, 2])).stretch(0, 2, np.arange(5)).tolist()
    [3, 4, 5, 0, 1]
    """

    def __init__(self, begins: Numbers, sizes: Numbers) -> None:
        self.ends = sizes.cumsum()
        """Number of blocks up to the end of each sample."""
        self._heads = self.ends - sizes
        self._sizes, self._ahead = sizes, begins - self._heads

    def stretch(self, first: int, last: int, ramp: Numbers) -> Numbers:
        """Return the blocks of samples `first` to `last` - 1; `ramp` is 0, 1, 2 ..., at least one for each block."""
        if first == last:
            return ramp[:0]
        blocks: Numbers = self._ahead[first:last].repeat(self._sizes[first:last])
        blocks += ramp[self._heads[first] : self.ends[last - 1]]
        return blocks
