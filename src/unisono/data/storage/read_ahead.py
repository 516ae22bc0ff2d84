"""Reading of blocks from stripes ahead of the steps that use them: a plan of the reads of a rank, and its player.

    its samples    13 14 | 12 15 | 18 17 | 16 19          blocks of 4 samples: 12 to 15 are block 3, 16 to 19 block 4
    plan           block 3 for 4 samples, block 4 for 4   in the order in which they are first used

    step           take 13 14 ── take 12 15 ── take 18 17 ── ...      waits only for a block that is not there yet
    reading        block 3 │ block 4 │            block 5 │           begun when block 3 has been handed out

A block stays until its last sample of the epoch has been handed out. Then the next ones are read, as many as fit. What
the current step needs is read even if it does not fit, so a step never waits for memory. A block that a node caches
(`replicated.py`) takes little memory in the plan, and is not read.

Bytes: 2 windows / p, the one that is used and the one that is read meanwhile. 4 ranks, windows of 1 GB: 512 MB a rank.

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
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, ranks_of
from unisono.data.storage.streamed_order import StripeBlocks
from unisono.errors import PackError

VIEW_BYTES = 200
"""Bytes that a sample in the cache takes in a plan: a view of it, where others are copied."""


class ReadPlan(NamedTuple):
    """Blocks to read, in the order in which they are first used; arrays with one entry for each."""

    blocks: Numbers
    uses: Numbers
    """Samples of the block that the rank will hand out."""
    nbytes: Numbers
    """Bytes of the block in memory."""


def plan_reads(blocks: StripeBlocks, seen: Numbers, cached: NDArray[np.bool_]) -> ReadPlan:
    """Return the plan for a rank that hands out the samples `seen`, in this order; of `cached` blocks it makes views.

    Blocks in the cache are in the plan, too: the step takes all samples in one way.
    """
    found, firsts, uses = np.unique(blocks.find(seen), return_index=True, return_counts=True)
    turns = np.argsort(firsts)
    nbytes = np.where(cached, VIEW_BYTES * (blocks.stops - blocks.firsts), blocks.nbytes)
    return ReadPlan(found[turns], uses[turns], nbytes[found[turns]])


def seen_by(order: Numbers, batch: int, done: int, rank: int, ranks: int, virtual: int = 0) -> Numbers:
    """Return the samples that a rank sees of an epoch's order from step `done` on (`order.share`)."""
    mine: NDArray[np.bool_] = ranks_of(len(order), batch, ranks, virtual) == rank
    mine[: done * batch] = False
    return order[mine]


def reads_that_fit(nbytes: Numbers, begun: int, held: int, limit: int) -> int:
    """Return how many reads of a plan may have begun, of which `begun` have, and `held` bytes are still in memory.

    >>> reads_that_fit(np.array([4, 4, 4, 4]), 1, 4, 12)
    3
    """
    after = held + nbytes[begun:].cumsum()
    return begun + int(np.searchsorted(after, limit, side="right"))


def memory_limit(blocks: StripeBlocks, window_bytes: int, ranks: int) -> int:
    """Return the bytes up to which a rank reads ahead: its part of two windows, and a block at either end of each."""
    largest = int(blocks.nbytes.max(initial=0))
    return min(2 * (-(-window_bytes // ranks) + 2 * largest), int(blocks.nbytes.sum()))


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
        self,
        plan: ReadPlan,
        read: Callable[[int], Samples],
        name_of: Callable[[int], str],
        limit: int,
        threads: int = READING_THREADS,
    ) -> None:
        """Begin to read. `read` returns the samples of a block and raises PackError; `name_of` names its file.

        `limit` is in bytes (`memory_limit`).
        """
        self._plan, self._read, self._name_of = plan, read, name_of
        self.limit = limit
        """Bytes up to which blocks are read ahead of the step."""
        self._turns = {block: turn for turn, block in enumerate(plan.blocks.tolist())}
        self._left = plan.uses.tolist()
        self._begun, self._reported = 0, set[str]()
        self._reads: dict[int, Future[Samples]] = {}
        self._queue: SimpleQueue[tuple[int, Future[Samples]] | None] = SimpleQueue()
        self.nbytes = 0
        """Bytes of the blocks that have been read or are being read."""
        self._threads = [threading.Thread(target=self._work, name="reading", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()
        self._begin_to(reads_that_fit(plan.nbytes, 0, 0, limit))

    def take(self, blocks: Numbers, rows: Numbers) -> Samples:
        """Return samples by block and row within it, as views, which stay valid. Waits for what is not there yet.

        A block that the plan does not have, or of which all planned samples have been taken, is read once more, for
        this call alone. Raises PackError if a block cannot be read.
        """
        numbers = blocks.tolist()
        uses = Counter(numbers)
        turns = {block: self._turns.get(block, -1) for block in uses}
        self._begin_to(max(self._begun, 1 + max(turns.values(), default=-1)))
        # all are under way before the first is waited for
        reads = {block: self._reads.get(block) or self._submit(block) for block in uses}
        found = {block: read.result() if read.done() else self._wait(block, read) for block, read in reads.items()}
        for block in uses.keys() & self._reads.keys():
            turn = turns[block]
            self._left[turn] -= uses[block]
            if self._left[turn] <= 0:  # views that are in use keep their memory
                del self._reads[block]
                self.nbytes -= int(self._plan.nbytes[turn])
        if not self.all_begun:
            self._begin_to(reads_that_fit(self._plan.nbytes, self._begun, self.nbytes, self.limit))
        return [found[block][row] for block, row in zip(numbers, rows.tolist(), strict=True)]

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
