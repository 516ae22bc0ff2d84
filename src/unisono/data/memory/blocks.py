"""Samples in whole blocks, so that copying samples in any order is taking rows of a table.

    blocks of 4 bytes      aaaa aa.. bbb. cccc cccc c...          samples of 6, 3 and 9 bytes begin at 0, 2, 3
    samples 2 and 0        blocks 3 4 5 0 1    ──take──▶          cccc cccc c... aaaa aa..

Where all samples are as long, a sample is a block. Else a block is so small that what is lost at the ends of samples is
a 28th of them (4 bytes a sample where they have less than 100), but no smaller, since their numbers take time too: some
8 ns, in which 60 bytes are copied.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

SHARE = 14
"""Blocks of a sample of mean length, where lengths differ."""

LEAST, MOST = 8, 512
"""Bytes of a block, where lengths differ: a multiple of the one, up to the other."""


def block_of(lengths: NDArray[np.int32]) -> int:
    """Bytes of a block, for samples of these lengths."""
    if not len(lengths):
        return LEAST
    if lengths.min() == lengths.max() > 0:
        return int(lengths[0])
    return min(MOST, max(LEAST, int(lengths.mean()) // SHARE // LEAST * LEAST))


def blocks_of(lengths: NDArray[np.int32], block: int) -> NDArray[np.int32]:
    """How many blocks samples of these lengths take."""
    return -(-lengths // np.int32(block))


class Run:
    """The blocks of samples one after another, a stretch of samples at a time: sizes[i] blocks from begins[i] on.

    >>> Run(np.array([3, 0]), np.array([3, 2])).stretch(0, 2, np.arange(5)).tolist()
    [3, 4, 5, 0, 1]
    """

    def __init__(self, begins: Numbers, sizes: Numbers) -> None:
        self.ends = sizes.cumsum()
        """Blocks up to each sample's last."""
        self._heads = self.ends - sizes
        self._sizes, self._ahead = sizes, begins - self._heads

    def stretch(self, first: int, last: int, ramp: Numbers) -> Numbers:
        """The blocks of samples `first` to `last` - 1; `ramp` is 0, 1, 2 ... up to at least all there are."""
        if first == last:
            return ramp[:0]
        blocks: Numbers = self._ahead[first:last].repeat(self._sizes[first:last])
        blocks += ramp[self._heads[first] : self.ends[last - 1]]
        return blocks
