"""Order of an epoch that is streamed from stripes, and the reads of a rank, in a plan.

The order is a function of (seed, epoch, batch, window), for any number of ranks.

A block is a record batch of a stripe: 4 MB, one checksum, the least that is read at once (`pack/packing.py`).

    line       c1 c0 c2 | a0 a2 a1 | b0 b1 b2 | d0 d2 d1     stripes a b c d in random order, blocks of each too
    windows     0  2  1    2  0  1    0  1  2    0  1  2     3 of as many bytes: each 3 neighbours are spread over all
    window 0   c1          a2         b0         d0          its samples are dealt to its steps, evenly along the line
    a step     c1 c1       a2 a2      b0 b0      d0 d0       its samples lie in the order of the line
    4 ranks    ── 0 ──     ── 1 ──    ── 2 ──    ── 3 ──     so `order.share` cuts the line itself

Rank r of p sees blocks from the r-th part of the line alone: it reads a p-th of the stripes (swCaffe 5.2), and a block
or two at either end that its neighbour also reads. `docs/data.md` says why, and what it costs.

Worked example, the picture above in numbers: 4 stripes of 3 blocks of 4 samples (a0 has 0 1 2 3, d2 has 44 45 46 47),
windows of 16 samples, steps of 8, seed 0, epoch 0:

    step 0    rank 0   29 28  c1      rank 1   11  9  a2      rank 2   13 14  b0      rank 3   37 36  d0
    step 1             30 31  c1                8 10  a2               12 15  b0               39 38  d0
    step 2             35 32  c2                4  5  a1               18 17  b1               46 44  d2
    step 3             33 34  c2                7  6  a1               16 19  b1               47 45  d2
    step 4             27 24  c0                1  2  a0               20 22  b2               40 41  d1
    step 5             26 25  c0                0  3  a0               23 21  b2               43 42  d1

A rank reads its blocks in the order in which they are first used:

    its samples    13 14 | 12 15 | 18 17 | 16 19          blocks of 4 samples: 12 to 15 are block 3, 16 to 19 block 4
    plan           block 3 for 4 samples, block 4 for 4

A block that a node caches (`replicated.py`) takes little memory in the plan, and is not read.

Bytes that a rank reads in an epoch: n / p, and about 2 blocks a window at the ends of its part. Its memory: 2 windows
/ p, the one that is used and the one that is read meanwhile. 4 ranks, windows of 1 GB: 512 MB a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, joined_ranges, ranks_of
from unisono.data.pack.index import Index
from unisono.schedules.pieces import bounds


class StripeBlocks(NamedTuple):
    """Blocks of samples, or parts of them, in the order of the pack; arrays with one entry for each."""

    firsts: Numbers
    """First sample."""
    stops: Numbers
    """Sample after the last."""
    stripes: Numbers
    nbytes: Numbers
    """Bytes of the samples."""

    def find(self, numbers: Numbers) -> Numbers:
        """Return the block of each of these samples, which must be in one."""
        blocks: Numbers = np.searchsorted(self.firsts, numbers, side="right") - 1
        return blocks


def blocks_of_pack(index: Index) -> StripeBlocks:
    """Return the blocks of a pack."""
    if not len(index):
        return StripeBlocks(*(np.empty(0, np.int64) for _ in range(4)))
    new = (np.diff(index.stripe) != 0) | (np.diff(index.batch) != 0)
    firsts = np.concatenate([[0], np.flatnonzero(new) + 1])
    nbytes = np.add.reduceat(index.length, firsts, dtype=np.int64)
    return StripeBlocks(firsts, np.append(firsts[1:], len(index)), index.stripe[firsts].astype(np.int64), nbytes)


def own_blocks(blocks: StripeBlocks, order: Numbers, rank: int, ranks: int) -> StripeBlocks:
    """Return the blocks that a rank out of step has to itself; `order` is a permutation of all samples.

    Each rank has as many samples, up to one; two ranks may have parts of one block. A rank's stay the same for the
    whole run, so they are drawn from all stripes: few stripes would be few classes.
    """
    positions = np.empty(len(order), np.int64)
    positions[order] = np.arange(len(order))
    drawn = np.argsort(positions[blocks.firsts])
    counts = (blocks.stops - blocks.firsts)[drawn]
    ends = counts.cumsum()
    first, last = bounds(int(counts.sum()), ranks, rank)
    begins = (first - (ends - counts)).clip(0, counts)
    stops = (last - (ends - counts)).clip(0, counts)
    held = np.flatnonzero(begins < stops)
    held = held[np.argsort(drawn[held])]
    chosen = drawn[held]
    nbytes = blocks.nbytes[chosen] * (stops - begins)[held] // counts[held]
    return StripeBlocks(
        blocks.firsts[chosen] + begins[held], blocks.firsts[chosen] + stops[held], blocks.stripes[chosen], nbytes
    )


def streamed_order(blocks: StripeBlocks, batch: int, window_bytes: int, rng: np.random.Generator) -> Numbers:
    """Return the samples of the blocks in an epoch's order, in steps of `batch`: int64, shape (samples,).

    `window_bytes` is the size of the shuffle buffer, over all ranks.
    """
    line = line_of(blocks.stripes, rng)
    windows = -(-int(blocks.nbytes.sum()) // window_bytes)
    window = windows_of(len(line), max(1, min(windows, len(line))), rng)
    counts = (blocks.stops - blocks.firsts)[line]
    place = np.arange(len(line)).repeat(counts)
    sample = joined_ranges(blocks.firsts[line], counts)
    by_window = np.argsort(window[place] * len(line) + place + rng.random(len(place)), kind="stable")
    place, sample = place[by_window], sample[by_window]
    step = steps_in_windows(np.bincount(window, counts).astype(np.int64), batch, rng.random(len(place)))
    order: Numbers = sample[np.argsort(step * len(line) + place, kind="stable")]
    return order


def line_of(stripes: Numbers, rng: np.random.Generator) -> Numbers:
    """Return the blocks, stripe after stripe, in random order; `stripes` has the stripe of each."""
    turns = rng.permutation(int(stripes.max(initial=-1)) + 1)
    return np.lexsort((rng.random(len(stripes)), turns[stripes]))


def windows_of(blocks: int, windows: int, rng: np.random.Generator) -> Numbers:
    """Return the window of each block on the line: each `windows` neighbours are spread over all windows."""
    groups = np.tile(np.arange(windows), (-(-blocks // windows), 1))
    return rng.permuted(groups, axis=1).reshape(-1)[:blocks]


def steps_in_windows(sizes: Numbers, batch: int, chance: NDArray[np.float64]) -> Numbers:
    """Return the step of each sample, where windows of `sizes` samples follow each other.

    Sample i of the count samples that a step takes from a window is drawn from the i-th part of `count` of the
    window; `chance`, in [0, 1), has a number for each sample. So every step is spread evenly over its window.

    >>> steps_in_windows(np.array([6, 2]), 4, np.full(8, 0.5)).tolist()
    [0, 1, 0, 0, 1, 0, 1, 1]
    """
    position = np.arange(int(sizes.sum()))
    window, step = np.arange(len(sizes)).repeat(sizes), position // batch
    begins = np.flatnonzero(np.diff(step, prepend=-1) | np.diff(window, prepend=-1))
    counts = np.diff(begins, append=len(position))
    inside = (position - begins.repeat(counts) + chance) / counts.repeat(counts)
    return step[np.argsort(window + inside, kind="stable")]


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
    distinct, firsts, uses = np.unique(blocks.find(seen), return_index=True, return_counts=True)
    turns = np.argsort(firsts)
    nbytes = np.where(cached, VIEW_BYTES * (blocks.stops - blocks.firsts), blocks.nbytes)
    return ReadPlan(distinct[turns], uses[turns], nbytes[distinct[turns]])


def seen_by(order: Numbers, batch: int, done: int, rank: int, ranks: int, virtual: int = 0) -> Numbers:
    """Return the samples that a rank sees of an epoch's order from step `done` on (`order.share`)."""
    seen: NDArray[np.bool_] = ranks_of(len(order), batch, ranks, virtual) == rank
    seen[: done * batch] = False
    return order[seen]


def reads_that_fit(ends: Numbers, begun: int, held: int, limit: int) -> int:
    """Return how many reads of a plan may have begun, of which `begun` have, and `held` bytes are still in memory.

    `ends` has the bytes of the first 0, 1, 2, ... reads.

    >>> reads_that_fit(np.array([0, 4, 8, 12, 16]), 1, 4, 12)
    3
    """
    return max(begun, int(np.searchsorted(ends, ends[begun] + limit - held, side="right")) - 1)


def memory_limit(blocks: StripeBlocks, window_bytes: int, ranks: int) -> int:
    """Return the bytes up to which a rank reads ahead: its part of two windows, and a block at either end of each."""
    largest = int(blocks.nbytes.max(initial=0))
    return min(2 * (-(-window_bytes // ranks) + 2 * largest), int(blocks.nbytes.sum()))
