"""Shuffle of samples across ranks (DIMD 4.1, Algorithm 2).

Segment by segment, each sample goes to its new owner (`docs/data.md`). On one node its sender copies it there; between
nodes samples are laid out by receiver and sent:

    rank 0   a b c d                 a d | b | c |                     a d  g  k     4 ranks, the first segment of each;
    rank 1   e f g h    ──copy─▶     g | e f | | h    ──exchange──▶    b  e f  l     received samples lie in the order
    rank 2   i j k l                 k | l | i | j                     c  i          of their senders
    rank 3   ...                                                       ...

Rounds: one for each segment, after two all_to_all exchanges. Bytes of each rank: on a node its samples, n / p, are read
once and written once; between nodes twice, and sent, less the n / p^2 that stay. Memory beside the samples: one
segment, free in the store or laid out, and spare capacity for random variation.

Arriving samples take the place of those that leave, without a second copy of the memory (compaction). In each round one
segment is sent, and its replacement is put at the other end. Here segments move from the beginning to the end:

    held         | 0 0 0 | 1 1 | . . . . |           9 rows, segments of 3 and 2
    round of 1   | 0 0 0 | 1 1 | . | 1'1'1' |        3 arrive, side by side in the order of their senders
    round of 0   | . . . | 0'0'0' | 1'1'1' |         3 again; the next shuffle moves back, beginning with 0'

If the memory is not enough, all ranks know it before any sample has moved.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.storage.sample_store import Counts, SampleBuffer, SampleStore
from unisono.world import World


def shuffle(store: SampleStore, owners: NDArray[np.integer]) -> None:
    """Move every sample to its new owner. Collective.

    All stores have the same number of segments. Raises PackError on every rank if more samples arrive than
    fit and a node has no more memory.
    """
    world = store.world
    if world.size == 1:
        return
    shortest = np.min_scalar_type(world.size - 1)  # the fastest to search
    to = owners.take(store.numbers).astype(shortest, copy=False)
    store.move()
    sent = store.counts(to)
    received = _transpose(world, sent)
    plan, begins = _plan(store, received)
    parts = np.split(to, store.rows[1:-1].tolist())
    if store.shared:
        for segment in plan.rounds:
            store.copy_segment(segment, parts[segment], store.buffers, begins[:, segment])
            world.barrier()
    else:
        rows, blocks = sent.sum(axis=0).max(axis=0).tolist()
        out = SampleBuffer(np.empty(rows, np.int32), np.empty((blocks, store.block), np.uint8))
        for segment in plan.rounds:
            laid_out = side_by_side(sent[:, segment])
            store.copy_segment(segment, parts[segment], [out] * world.size, laid_out)
            for kind in (0, 1):
                world.all_to_all_v(
                    _parts(out[kind], laid_out[:, kind], sent[:, segment, kind]),
                    _parts(store.own[kind], plan.destinations[:, segment, kind], received[:, segment, kind]),
                )
    store.set_segments(plan.cuts, not store.at_start)


def _plan(store: SampleStore, received: Counts) -> tuple[CompactionPlan, Counts]:
    """Return this rank's plan, and where others put its samples, (ranks, segments, 2). Stores grow if necessary."""
    while True:
        plan = plan_compaction(store.cuts, received, store.capacity, store.at_start, not store.shared)
        own = np.concatenate([plan.destinations, np.broadcast_to(plan.missing, (store.world.size, 1, 2))], axis=1)
        others = _transpose(store.world, own)
        missing = others[:, -1].max(axis=0)
        if not missing.any():
            return plan, others[:, :-1]
        store.grow(missing)


def _transpose(world: World, array: NDArray[np.int64]) -> NDArray[np.int64]:
    """Send entry r of an array to rank r; return the entries received from all ranks."""
    swapped: NDArray[np.int64] = world.all_to_all(torch.from_numpy(np.ascontiguousarray(array))).numpy()
    return swapped


def _parts(array: NDArray[np.generic], begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[torch.Tensor]:
    whole = torch.from_numpy(array)
    return [whole[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]


def side_by_side(sizes: Counts) -> Counts:
    """Return where the parts of all ranks begin if they lie side by side, (ranks, ...), the first one at 0."""
    begins: Counts = sizes.cumsum(axis=0) - sizes
    return begins


class CompactionPlan(NamedTuple):
    """Plan of a rank for the samples that arrive."""

    cuts: Counts
    """Row and block at which its segments will begin and the last one end: (segments + 1, 2)."""
    destinations: Counts
    """Row and block at which the samples from each rank in each round are put: (ranks, segments, 2)."""
    rounds: range
    """Segments in the order in which they are sent."""
    missing: Counts
    """Rows and blocks that are missing, so that nothing still needed would be overwritten: (2,)."""


def plan_compaction(cuts: Counts, received: Counts, available: Counts, up: bool, laid_out: bool) -> CompactionPlan:
    """Return the plan of a rank whose segments lie between `cuts` and move to the other end of its memory, `available`.

    They move to the end if `up`, else to the beginning. `received` has the rows and blocks from each rank in each
    round, (ranks, segments, 2). If a segment is `laid_out` elsewhere before its replacement arrives, the replacement
    may overwrite it.
    """
    sizes = received.sum(axis=0)
    new = np.concatenate([np.zeros((1, 2), np.int64), sizes.cumsum(axis=0)])
    if up:
        new += available - new[-1]
    needed = cuts[:-1] if up == laid_out else cuts[1:]  # up to here, or from here on, in each round
    overlap = needed - new[:-1] if up else new[1:] - needed
    rounds = range(len(sizes))
    destinations = new[:-1] + side_by_side(received)
    return CompactionPlan(new, destinations, rounds[::-1] if up else rounds, overlap.max(axis=0).clip(min=0))
