"""Plan of the blocks that a rank reads in an epoch, ahead of the steps that use them.

    its samples    13 14 | 12 15 | 18 17 | 16 19          blocks of 4 samples: 12 to 15 are block 3, 16 to 19 block 4
    plan           block 3 for 4 samples, block 4 for 4   in the order in which they are first used

A block that a node caches (`block_cache.py`) takes little memory in the plan, and is not read.

A block stays until its last sample of the epoch has been handed out. Then the next ones are read, as many as fit. What
the current step needs is read even if it does not fit, so a step never waits for memory.

Bytes: 2 windows / p, the one that is used and the one that is read meanwhile. 4 ranks, windows of 1 GB: 512 MB a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import ranks_of
from unisono.data.storage.streamed_order import Numbers, StripeBlocks

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


def seen_by(order: Numbers, batch: int, done: int, rank: int, ranks: int) -> Numbers:
    """Return the samples that a rank sees of an epoch's order from step `done` on (`order.share`)."""
    mine: NDArray[np.bool_] = ranks_of(len(order), batch, ranks) == rank
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
