"""Streamed storage: samples are read from stripes during training, ahead of the step, through a shuffle buffer.

    stripes ──read ahead, blocks of 4 MB──▶ shuffle buffer: 2 windows over all ranks ──▶ samples of the step

    cache of the node ───views of blocks──▶                                 (`replicated.py`, if there is one)

    read     a b c d ...   y z   f c e ...           blocks of the next epoch, when the last ones of this have begun
    steps      0 1 2 ...         98 99 │ test │ 0 1 2 ...

It needs no memory for the pack and no shuffle between ranks. The order (`streamed_order.py`) is no full permutation: it
is drawn block by block. Each rank plans its reads of an epoch by itself, and its threads play them:

    step           take 13 14 ── take 12 15 ── take 18 17 ── ...      waits only for a block that is not there yet
    reading        block 3 │ block 4 │            block 5 │           begun when block 3 has been handed out

So nothing but `read` and `close` is collective, and a rank out of step reads in the same way, samples of its own.

A block stays until its last sample of the epoch has been handed out. Then the next ones are read, as many as fit. What
the current step needs is read even if it does not fit, so a step never waits for memory.

`take` alone decides and changes the state, in the thread that calls it; the reading threads only read. They are
daemons, since one that a file system does not answer would otherwise keep the process from its end. A file that has not
answered for SLOW_SECONDS is reported once, and the step still waits; after STUCK_SECONDS it is an error.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from unisono.data.options import DataOptions
from unisono.data.order import Numbers, ShuffleOptions, epoch_rng, joined_ranges
from unisono.data.pack.index import Index
from unisono.data.pack.stripe import OpenStripes, check_stripes
from unisono.data.storage import Storage
from unisono.data.storage.free_memory import check_free_memory
from unisono.data.storage.replicated import ReplicatedStorage
from unisono.data.storage.streamed_order import (
    ReadPlan,
    blocks_of_pack,
    memory_limit,
    own_blocks,
    plan_reads,
    reads_that_fit,
    seen_by,
    streamed_order,
)
from unisono.errors import PackError
from unisono.schedules.pieces import bounds
from unisono.world import World

NOTHING = np.empty(0, np.int64)


Position = tuple[int, int, int]
"""Seed, epoch, and samples of a step."""


class StreamedStorage(Storage):
    """Samples of a pack in its stripes, of which each rank of `world` has a window in memory."""

    def __init__(self, index: Index, world: World, options: DataOptions) -> None:
        """Look at the stripes, each rank of a node at a part of them. Collective.

        Raises PackError on every rank if a stripe is missing or cut off, or a node has no memory for the windows and
        its cache.
        """
        super().__init__(len(index), world)
        self._index, self._window_bytes, self._blocks = index, options.buffer, blocks_of_pack(index)
        layout = crc32(self._blocks.stripes.tobytes(), crc32(self._blocks.firsts.tobytes()))
        # with other windows or stripes, the order is another; older releases have not told the stripes
        self.order_name = f"streamed in windows of {options.buffer} bytes {layout:08x}"
        self._limit = memory_limit(self._blocks, options.buffer, world.size)
        check_free_memory(world, self._limit)
        node = world.node_world()
        first, last = bounds(len(index), node.size, node.rank)
        world.call_on_all(lambda: check_stripes(index, first, last))
        self._cached = choose_cached(self._blocks.nbytes, options.cache)
        held = self._blocks.firsts[self._cached], self._blocks.stops[self._cached]
        self._cache = ReplicatedStorage(index, world, stretches=held) if options.cache else None
        self._stripes = OpenStripes(index)
        self._position: Position | None = None
        self._next: Future[tuple[Position, Numbers, ReadPlan]] | None = None  # the order, and what this rank reads
        self._ahead: ReadAhead | None = None
        self._reader = ReadAhead(self._plan(NOTHING), self._read, self._name_of, self._limit)

    def order(self, seed: int, epoch: int, batch: int, shuffle: ShuffleOptions) -> Numbers:  # noqa: ARG002
        """Return the streamed order of an epoch; no samples move between ranks, so there is no interval."""
        self._position = seed, epoch, batch
        if self._next is not None and (prepared := self._next.result())[0] == self._position:
            return prepared[1]
        return streamed_order(self._blocks, batch, self._window_bytes, epoch_rng(seed, epoch))

    def epoch(self, order: Numbers, batch: int, done: int = 0) -> None:
        """Begin to read what this rank will see of `order` from step `done` on, or go on if that has begun."""
        prepared, ahead = self._next, self._ahead
        self._next = self._ahead = None
        if ahead is not None and prepared is not None and prepared.result()[1] is order and not done:
            self._reader.stop()
            self._reader, ahead.limit = ahead, self._limit
            return
        if ahead is not None:
            ahead.stop()
        self._begin(seen_by(order, batch, done, self.world.rank, self.world.size, self.virtual))

    def own(self, order: Numbers) -> Numbers:
        """Return the samples of the blocks that are this rank's own, the same for the whole run."""
        self._own_blocks = blocks = own_blocks(self._blocks, order, self.world.rank, self.world.size)
        return joined_ranges(blocks.firsts, blocks.stops - blocks.firsts)

    def own_epoch(self, seed: int, epoch: int, batch: int, done: int) -> Numbers:
        """Return the streamed order of this rank's own samples, and begin to read them from step `done` on."""
        rng = epoch_rng(seed, epoch, self.world.rank)
        order = streamed_order(self._own_blocks, batch, max(1, self._window_bytes // self.world.size), rng)
        self._begin(order[done * batch :])
        return order

    def samples(self, numbers: Numbers) -> list[NDArray[np.uint8]]:
        """Return the bytes of samples, as views that stay valid: those of the next step from memory.

        Any others are read at once. Raises PackError if a block is missing or damaged, or is not read in time.
        """
        blocks = self._blocks.find(numbers)
        views = self._reader.take(blocks, numbers - self._blocks.firsts[blocks])
        self._read_on()
        return views

    @property
    def nbytes(self) -> int:
        parts = self._reader, self._ahead, self._cache
        return sum(part.nbytes for part in parts if part is not None)

    def stop(self) -> None:
        for reader in (self._reader, self._ahead):
            if reader is not None:
                reader.stop()
        self._stripes.close()

    def close(self) -> None:
        self.stop()
        if self._cache is not None:
            self._cache.close()
        self._ahead = self._cache = None

    def _read_on(self) -> None:
        """Begin to read the next epoch in half of the memory, as soon as this one needs no more than the other half."""
        if self._position is None or self._ahead is not None:
            return
        if self._next is None:
            pool = ThreadPoolExecutor(1, "order of the next epoch")
            self._next = pool.submit(self._prepare, *self._position)
            pool.shutdown(wait=False)
        if self._next.done() and self._reader.all_begun and 2 * self._reader.nbytes <= self._limit:
            self._ahead = ReadAhead(self._next.result()[2], self._read, self._name_of, self._limit // 2)

    def _prepare(self, seed: int, epoch: int, batch: int) -> tuple[Position, Numbers, ReadPlan]:
        """Return the order and the plan of the epoch after this one."""
        order = streamed_order(self._blocks, batch, self._window_bytes, epoch_rng(seed, epoch + 1))
        seen = seen_by(order, batch, 0, self.world.rank, self.world.size, self.virtual)
        return (seed, epoch + 1, batch), order, self._plan(seen)

    def _begin(self, seen: Numbers) -> None:
        """Drop what was read, and read ahead for the samples `seen`."""
        self._reader.stop()
        self._reader = ReadAhead(self._plan(seen), self._read, self._name_of, self._limit)

    def _plan(self, seen: Numbers) -> ReadPlan:
        return plan_reads(self._blocks, seen, self._cached)

    def _read(self, block: int) -> Samples:
        first, stop = int(self._blocks.firsts[block]), int(self._blocks.stops[block])
        if self._cache is not None and self._cached[block]:
            return self._cache.samples(np.arange(first, stop))
        return [sample for stretch in self._stripes.read(first, stop) for sample in stretch.each()]

    def _name_of(self, block: int) -> str:
        return str(self._index.folder / self._index.about.stripes[int(self._blocks.stripes[block])][0])


def choose_cached(nbytes: Numbers, allowed: int) -> NDArray[np.bool_]:
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


READING_THREADS = 2
"""Threads that read, in each rank: one waits for the file system while the other verifies checksums."""

SLOW_SECONDS = 30.0
"""Seconds a step waits for a block before its file is reported."""

STUCK_SECONDS = 300.0
"""Seconds a step waits for a block before the run ends."""

JOIN_SECONDS = 1.0
"""Seconds to wait for the end of a read when the blocks are dropped."""

Samples = list[NDArray[np.uint8]]
"""Bytes of each sample of a block."""


class ReadAhead:
    """Blocks of one plan, read by threads of its own."""

    def __init__(
        self, plan: ReadPlan, read: Callable[[int], Samples], name_of: Callable[[int], str], limit: int
    ) -> None:
        """Begin to read. `read` returns the samples of a block and raises PackError; `name_of` names its file.

        `limit` is in bytes (`memory_limit`).
        """
        self._plan, self._read, self._name_of = plan, read, name_of
        self.limit = limit
        """Bytes up to which blocks are read ahead of the step."""
        self._turns = {block: turn for turn, block in enumerate(plan.blocks.tolist())}
        self._left = plan.uses.tolist()
        self._ends: Numbers = np.concatenate([[0], plan.nbytes.cumsum(dtype=np.int64)])
        self._begun, self._reported = 0, set[str]()
        self._reads: dict[int, Future[Samples]] = {}
        self._queue: SimpleQueue[tuple[int, Future[Samples]] | None] = SimpleQueue()
        self.nbytes = 0
        """Bytes of the blocks that have been read or are being read."""
        self._threads = [
            threading.Thread(target=self._work, name="reading", daemon=True) for _ in range(READING_THREADS)
        ]
        for thread in self._threads:
            thread.start()
        self._begin_to(reads_that_fit(self._ends, 0, 0, limit))

    def take(self, blocks: Numbers, rows: Numbers) -> Samples:
        """Return samples by block and row within it, as views, which stay valid. Waits for what is not there yet.

        A block that the plan does not have, or of which all planned samples have been taken, is read once more, for
        this call alone. Raises PackError if a block cannot be read.
        """
        numbers = blocks.tolist()
        uses = Counter(numbers)
        self._begin_to(1 + max((self._turns.get(block, -1) for block in uses), default=-1))
        # all are under way before the first is waited for
        reads = {block: self._reads.get(block) or self._submit(block) for block in uses}
        by_block = {block: read.result() if read.done() else self._wait(block, read) for block, read in reads.items()}
        for block in uses.keys() & self._reads.keys():
            turn = self._turns[block]
            self._left[turn] -= uses[block]
            if self._left[turn] <= 0:  # views that are in use keep their memory
                del self._reads[block]
                self.nbytes -= int(self._plan.nbytes[turn])
        if not self.all_begun:
            self._begin_to(reads_that_fit(self._ends, self._begun, self.nbytes, self.limit))
        return [by_block[block][row] for block, row in zip(numbers, rows.tolist(), strict=True)]

    @property
    def all_begun(self) -> bool:
        """True if the reads of the whole plan have begun."""
        return self._begun == len(self._plan.blocks)

    def stop(self) -> None:
        """Drop the blocks and end the threads; a read that its file system does not answer is left behind."""
        for read in self._reads.values():
            read.cancel()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        self._reads, self.nbytes = {}, 0

    def _begin_to(self, last: int) -> None:
        """Submit the reads of the plan up to turn `last` - 1."""
        for turn in range(self._begun, last):
            block = int(self._plan.blocks[turn])
            self._reads[block] = self._submit(block)
            self.nbytes += int(self._plan.nbytes[turn])
        self._begun = max(self._begun, last)

    def _submit(self, block: int) -> Future[Samples]:
        read = Future[Samples]()
        self._queue.put((block, read))
        return read

    def _wait(self, block: int, read: Future[Samples]) -> Samples:
        """Return the samples of a block; report a file that does not answer once. Raises PackError."""
        begin, name = time.monotonic(), self._name_of(block)
        for limit in (min(SLOW_SECONDS, STUCK_SECONDS), STUCK_SECONDS):
            try:
                return read.result(max(0.0, begin + limit - time.monotonic()))
            except FutureTimeoutError:
                silent = f"{name} has not answered for {time.monotonic() - begin:.0f} s"
            if limit < STUCK_SECONDS and name not in self._reported:
                self._reported.add(name)
                print(f"unisono: {silent}; the step waits for it", file=sys.stderr, flush=True)
        raise PackError(f"{silent}: its file system is slow or gone; check it, then resume the run")

    def _work(self) -> None:
        """Read blocks until `stop`. Errors go to the step that takes the block."""
        while (task := self._queue.get()) is not None:
            block, read = task
            if not read.set_running_or_notify_cancel():
                continue
            try:
                samples = self._read(block)
            except BaseException as error:  # noqa: BLE001 - any error must reach the step that takes the block
                read.set_exception(error)
            else:
                read.set_result(samples)
