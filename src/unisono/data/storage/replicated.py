"""Samples in the memory of each node, which are read once, and shared by its ranks; a shuffle is then a permuted index.

    a copy of the pack (DIMD 4.1)   rank 0 reads 0 1 2 3 4, rank 1 reads 5 6 7 8 9; both see all

    the cache of a streamed pack (`streamed.py`):

    stripes          a0 a1 a2 │ b0 b1 b2 │ c0 c1 c2      blocks of 4 MB
    12 MB a node           a2         b2         c2      every third block: any part of any epoch has its share
    a rank reads     a0 a1    │ b0 b1    │ c0 c1         the rest, ahead of the step (`streamed.py`)

The order of an epoch does not depend on the cache, so a run may go on with another. Each block is as likely as any
other to be one that a node needs in an epoch, so the cache never changes: the blocks that were read last would be found
in it no more often.

Worked example: 4 ranks on 2 nodes, a pack of 90 GB, 30 GB of cache in each node: ranks 0 and 1 hold 15 GB each, as
ranks 2 and 3 do; an epoch reads 60 GB from the stripes instead of 90 GB.

Bytes: n / p read once by p ranks of a node for n bytes; with a cache then (1 - n / pack) of the pack in each epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.options import DataOptions
from unisono.data.order import Numbers
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import read_stretch
from unisono.data.storage import Storage
from unisono.data.storage.free_memory import check_free_memory
from unisono.errors import PackError
from unisono.schedules.pieces import bounds
from unisono.transports.window import allocate_window
from unisono.world import World


class ReplicatedStorage(Storage):
    """Samples of a pack in the memory of each node of `world`: all of them, or stretches of the pack."""

    def __init__(
        self,
        index: Index,
        world: World,
        _: DataOptions | None = None,
        stretches: tuple[Numbers, Numbers] | None = None,
    ) -> None:
        """Read the pack, or the samples firsts[i] to stops[i] - 1 of each of the ascending `stretches`. Collective.

        Each rank of a node reads as many stretches. Raises PackError on every rank if a node has no memory for them, or
        a stripe is missing or damaged.
        """
        super().__init__(len(index), world)
        node = world.node_world()
        if stretches is None:
            firsts, stops = np.array([bounds(len(index), node.size, member) for member in range(node.size)]).T
        else:
            firsts, stops = stretches
        self._firsts, self._length = firsts, index.length
        self._ends = np.concatenate([[0], index.length.cumsum(dtype=np.int64)])
        sizes, self._begins = self._ends[stops] - self._ends[firsts], np.zeros(len(firsts), np.int64)
        self._readers = np.zeros(len(firsts), np.int64)
        for member in range(node.size):
            part = slice(*bounds(len(firsts), node.size, member))
            self._readers[part], self._begins[part] = member, sizes[part].cumsum() - sizes[part]
        assigned = slice(*bounds(len(firsts), node.size, node.rank))
        nbytes = int(sizes[assigned].sum())
        check_free_memory(world, nbytes, shared=True)
        window = allocate_window(node.comm, nbytes)
        short = [rank for rank, allocated in enumerate(world.all_gather_object(window is not None)) if not allocated]
        if window is None or short:
            if window is not None:
                window.free()
            raise PackError(
                f"the node of rank {short[0]} has no more shared memory (/dev/shm) for its copy of the pack: others "
                'have taken it; store the pack partitioned (storage = "partitioned"), or make /dev/shm larger'
            )
        self._window = window
        self._parts = [np.frombuffer(buffer, np.uint8) for buffer in self._window.buffers]

        def read() -> None:
            memory, offset = self._parts[node.rank], 0
            for first, stop in zip(firsts[assigned].tolist(), stops[assigned].tolist(), strict=True):
                for data, _ in read_stretch(index, first, stop):
                    memory[offset : offset + len(data)] = data
                    offset += len(data)

        try:
            world.call_on_all(read)
        except PackError:
            self.close()
            raise
        self._window.sync()
        node.comm.Barrier()
        self._window.sync()

    def samples(self, numbers: Numbers) -> list[NDArray[np.uint8]]:
        stretches = np.searchsorted(self._firsts, numbers, side="right") - 1
        begins = self._begins[stretches] + self._ends[numbers] - self._ends[self._firsts[stretches]]
        ranges = zip(self._readers[stretches].tolist(), begins.tolist(), self._length[numbers].tolist(), strict=True)
        return [self._parts[reader][begin : begin + length] for reader, begin, length in ranges]

    @property
    def nbytes(self) -> int:
        return self._window.nbytes

    def close(self) -> None:
        self._parts = []
        self._window.free()
