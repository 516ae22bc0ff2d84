"""Cache of a streamed pack: blocks that stay in the memory of each node, are read once, and are shared by its ranks.

    stripes          a0 a1 a2 │ b0 b1 b2 │ c0 c1 c2      blocks of 4 MB
    12 MB a node           a2         b2         c2      every third block: any part of any epoch has its share
    a rank reads     a0 a1    │ b0 b1    │ c0 c1         the rest, ahead of the step (`read_ahead.py`)

The order of an epoch does not depend on the cache, so a run may go on with another. Each block is as likely as any
other to be one that a node needs in an epoch, so the cache never changes: the blocks that were read last would be found
in it no more often.

Worked example: 4 ranks on 2 nodes, a pack of 90 GB, 30 GB of cache in each node: ranks 0 and 1 hold 15 GB each, as
ranks 2 and 3 do; an epoch reads 60 GB from the stripes instead of 90 GB.

Bytes: n / p read once by p ranks of a node for a cache of n bytes; then (1 - n / pack) of the pack in each epoch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.data.storage.free_memory import check_free_memory
from unisono.data.storage.streamed_order import Numbers, StripeBlocks
from unisono.schedules.pieces import bounds
from unisono.transports.window import Window
from unisono.world import World

Flags = NDArray[np.bool_]


def choose_cached(nbytes: Numbers, allowed: int) -> Flags:
    """Return True for the blocks to hold, of `nbytes` each: at most `allowed` bytes, evenly along the pack.

    >>> choose_cached(np.array([4, 4, 4, 4, 4, 4]), 8).tolist()
    [False, False, True, False, False, True]
    """
    chosen, total = np.zeros(len(nbytes), np.bool_), int(nbytes.sum())
    owed = 0  # bytes to hold among the blocks so far, times `total`
    for block, size in enumerate(nbytes.tolist()):
        owed += size * min(allowed, total)
        if 0 < size * total <= owed:
            chosen[block] = True
            owed -= size * total
    return chosen


class BlockCache:
    """Blocks of a pack in the shared memory of each node of `world`."""

    def __init__(self, index: Index, blocks: StripeBlocks, allowed: int, world: World) -> None:
        """Read the blocks that `allowed` bytes a node hold, each rank a part of its node's. Collective.

        Raises PackError on every rank if a node has no memory for them, or a stripe is missing or damaged.
        """
        node = world.node_world()
        self.cached = choose_cached(blocks.nbytes, allowed)
        """True for each block that is held."""
        held = np.flatnonzero(self.cached)
        parts = [held[slice(*bounds(len(held), node.size, member))] for member in range(node.size)]
        own = parts[node.rank]
        check_free_memory(world, int(blocks.nbytes[own].sum()), shared=True)
        self._index, self._blocks = index, blocks
        self._window = Window(node.comm, int(blocks.nbytes[own].sum()))
        self._places: dict[int, NDArray[np.uint8]] = {}
        for part, buffer in zip(parts, self._window.buffers, strict=True):
            memory, ends = np.frombuffer(buffer, np.uint8), blocks.nbytes[part].cumsum().tolist()
            for block, (begin, end) in zip(part.tolist(), pairwise([0, *ends]), strict=True):
                self._places[block] = memory[begin:end]

        def read() -> None:
            for block in own.tolist():
                at = 0
                for data, _ in read_stretch(index, int(blocks.firsts[block]), int(blocks.stops[block])):
                    self._places[block][at : at + len(data)] = data
                    at += len(data)

        world.call_on_all(read)
        self._window.sync()
        node.comm.Barrier()
        self._window.sync()

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds for its node."""
        return self._window.nbytes

    def holds(self, first: int) -> bool:
        """Return True if the block of sample `first` is held."""
        return int(self._blocks.find(np.array([first]))[0]) in self._places

    def samples(self, first: int, stop: int) -> list[NDArray[np.uint8]]:
        """Return the bytes of the samples `first` to `stop` - 1 of one block that is held, as views of its memory."""
        block = int(self._blocks.find(np.array([first]))[0])
        begin, end = int(self._blocks.firsts[block]), int(self._blocks.stops[block])
        ends = self._index.length[begin:end].cumsum(dtype=np.int64).tolist()
        cuts = [0, *ends][first - begin : stop - begin + 1]
        memory = self._places[block]
        return [memory[one:other] for one, other in pairwise(cuts)]

    def close(self) -> None:
        """Free the memory. Collective."""
        self._places = {}
        self._window.free()
