"""Streamed storage: samples are read from stripes during training, ahead of the step, through a shuffle buffer.

    stripes ──read ahead, blocks of 4 MB──▶ shuffle buffer: 2 windows over all ranks ──▶ samples of the step

    cache of the node ───views of blocks──▶                                 (`node_memory.py`, if there is one)

    read     a b c d ...   y z   f c e ...           blocks of the next epoch, when the last ones of this have begun
    steps      0 1 2 ...         98 99 │ test │ 0 1 2 ...

It needs no memory for the pack and no shuffle between ranks. The order (`streamed_order.py`) is no full permutation: it
is drawn block by block. Each rank plans its reads of an epoch by itself, and its threads play them (`read_ahead.py`).
So nothing but `read` and `close` is collective, and a rank out of step reads in the same way, from blocks of its own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, ShuffleOptions, epoch_rng, worker_rng
from unisono.data.pack.index import Index
from unisono.data.pack.stripe_file import OpenStripes, check_stripes
from unisono.data.storage import Storage, StorageOptions
from unisono.data.storage.free_memory import check_free_memory
from unisono.data.storage.node_memory import SharedStretches, choose_cached
from unisono.data.storage.read_ahead import ReadAhead, ReadPlan, memory_limit, plan_reads, seen_by
from unisono.data.storage.streamed_order import StripeBlocks, blocks_of_pack, own_blocks, streamed_order
from unisono.schedules.pieces import bounds
from unisono.world import World


def read(index: Index, options: StorageOptions, world: World) -> StreamedStorage:
    """Return the pack as it is read from its stripes by the ranks that share each batch."""
    return StreamedStorage(index, world, options.buffer, options.cache)


NOTHING = np.empty(0, np.int64)


class PreparedEpoch(NamedTuple):
    """Order of a later epoch, and what this rank reads for it."""

    seed: int
    epoch: int
    batch: int
    order: Numbers
    plan: ReadPlan


class StreamedStorage(Storage):
    """Samples of a pack in its stripes, of which each rank of `world` has a window in memory."""

    def __init__(self, index: Index, world: World, window_bytes: int, cache_bytes: int = 0) -> None:
        """Look at the stripes, each rank at a part of them. Collective.

        Raises PackError on every rank if a stripe is missing or cut off, or a node has no memory for the windows and
        its cache of `cache_bytes`.
        """
        super().__init__(len(index), world)
        self._index, self._window_bytes, self._blocks = index, window_bytes, blocks_of_pack(index)
        self.order_name = f"streamed in windows of {window_bytes} bytes"  # with others, the order is another
        self._limit = memory_limit(self._blocks, window_bytes, world.size)
        check_free_memory(world, self._limit)
        first, last = bounds(len(index), world.size, world.rank)
        world.call_on_all(lambda: check_stripes(index, first, last))
        self._cached = choose_cached(self._blocks.nbytes, cache_bytes)
        held = self._blocks.firsts[self._cached], self._blocks.stops[self._cached]
        self._cache = SharedStretches(index, *held, world) if cache_bytes else None
        self._stripes = OpenStripes(index)
        self._next: Future[PreparedEpoch] | None = None
        self._ahead: ReadAhead | None = None
        self._position: tuple[int, int, int] | None = None
        self._planned, self._reader = self._blocks, self._read_ahead(self._blocks, self._plan_of(self._blocks))

    def order(self, seed: int, epoch: int, batch: int, shuffle: ShuffleOptions) -> Numbers:  # noqa: ARG002
        """Return the streamed order of an epoch; no samples move between ranks, so there is no interval."""
        self._position = seed, epoch, batch
        if self._next is not None and (prepared := self._next.result())[:3] == self._position:
            return prepared.order
        return streamed_order(self._blocks, batch, self._window_bytes, epoch_rng(seed, epoch))

    def epoch(self, order: Numbers, batch: int, done: int = 0) -> None:
        """Begin to read what this rank will see of `order` from step `done` on, or go on if that has begun."""
        prepared, ahead = self._next, self._ahead
        self._next = self._ahead = None
        if ahead is not None and prepared is not None and prepared.result().order is order and not done:
            self._reader.stop()
            self._reader, self._planned = ahead, self._blocks
            ahead.limit = self._limit
            return
        if ahead is not None:
            ahead.stop()
        self._begin(self._blocks, seen_by(order, batch, done, self._world.rank, self._world.size))

    def own(self, order: Numbers) -> Numbers:
        """Return the samples of the blocks that are this rank's own, the same for the whole run."""
        self._own = own_blocks(self._blocks, order, self._world.rank, self._world.size)
        ranges = zip(self._own.firsts.tolist(), self._own.stops.tolist(), strict=True)
        return np.concatenate([np.empty(0, np.int64), *(np.arange(first, stop) for first, stop in ranges)])

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> Numbers:
        """Return the streamed order of this rank's own samples, and begin to read them from step `done` on."""
        rng = worker_rng(seed, self._world.rank, epoch)
        order = streamed_order(self._own, batch, max(1, self._window_bytes // self._world.size), rng)
        self._begin(self._own, order[done * batch :])
        return order

    def samples(self, numbers: Numbers) -> list[NDArray[np.uint8]]:
        """Return the bytes of samples, as views that stay valid: those of the next step from memory.

        Any others are read at once. Raises PackError if a block is missing or damaged, or is not read in time.
        """
        blocks = self._planned.find(numbers)
        inside = len(blocks) == 0 or bool((blocks >= 0).all() and (numbers < self._planned.stops[blocks]).all())
        if not inside:  # of other ranks' own blocks, or after the last epoch
            self._begin(self._blocks)
            blocks = self._planned.find(numbers)
        found = self._reader.take(blocks, numbers - self._planned.firsts[blocks])
        self._read_on()
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the samples that this rank holds."""
        held = self._reader.nbytes + (self._ahead.nbytes if self._ahead is not None else 0)
        return held + (self._cache.nbytes if self._cache is not None else 0)

    def close(self) -> None:
        """Stop the threads and free the memory. Collective."""
        self._reader.stop()
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None
        self._stripes.close()
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _read_on(self) -> None:
        """Begin to read the next epoch in half of the memory, as soon as this one needs no more than the other half."""
        if self._position is None or self._ahead is not None:
            return
        if self._next is None:
            self._next = self._prepare(*self._position)
        if self._next.done() and self._reader.all_begun and 2 * self._reader.nbytes <= self._limit:
            self._ahead = self._read_ahead(self._blocks, self._next.result().plan, self._limit // 2)

    def _prepare(self, seed: int, epoch: int, batch: int) -> Future[PreparedEpoch]:
        """Return the order and the plan of the epoch after this one, which a thread computes."""

        def compute() -> PreparedEpoch:
            order = streamed_order(self._blocks, batch, self._window_bytes, epoch_rng(seed, epoch + 1))
            seen = seen_by(order, batch, 0, self._world.rank, self._world.size)
            return PreparedEpoch(seed, epoch + 1, batch, order, self._plan_of(self._blocks, seen))

        pool = ThreadPoolExecutor(1, "order of the next epoch")
        prepared = pool.submit(compute)
        pool.shutdown(wait=False)
        return prepared

    def _begin(self, blocks: StripeBlocks, seen: Numbers = NOTHING) -> None:
        """Drop what was read, and read ahead for the samples `seen`, which are in `blocks`."""
        self._reader.stop()
        self._planned, self._reader = blocks, self._read_ahead(blocks, self._plan_of(blocks, seen))

    def _plan_of(self, blocks: StripeBlocks, seen: Numbers = NOTHING) -> ReadPlan:
        """Return the plan for the samples `seen`, which are in `blocks`."""
        return plan_reads(blocks, seen, self._cached[self._blocks.find(blocks.firsts)])

    def _read_ahead(self, blocks: StripeBlocks, plan: ReadPlan, limit: int = 0) -> ReadAhead:
        """Return the player of a plan for `blocks`, which begins to read; `limit` is in bytes, 0: all that may be."""
        cache = self._cache

        def read(block: int) -> list[NDArray[np.uint8]]:
            first, stop = int(blocks.firsts[block]), int(blocks.stops[block])
            if cache is not None and cache.holds(first):
                return cache.samples(np.arange(first, stop))
            stretches = self._stripes.read(first, stop)
            return [data[begin:end] for data, offsets in stretches for begin, end in pairwise(offsets.tolist())]

        def name_of(block: int) -> str:
            return str(self._index.folder / self._index.about.stripes[int(blocks.stripes[block])][0])

        return ReadAhead(plan, read, name_of, limit or self._limit)
