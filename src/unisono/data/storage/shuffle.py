"""Shuffle of samples across ranks (DIMD 4.1, Algorithm 2).

The samples of a rank are cut into segments. First the ranks exchange how much each sends to each, so that every rank
knows where all samples will lie (`compaction.py`). Then, segment by segment, each sample goes to its new owner. On one
node its sender copies it there; between nodes samples are laid out by receiver and sent:

    rank 0   a b c d                 a d | b | c |                     a d  g  k     4 ranks, the first segment of each;
    rank 1   e f g h    ──copy─▶     g | e f | | h    ──exchange──▶    b  e f  l     received samples lie in the order
    rank 2   i j k l                 k | l | i | j                     c  i          of their senders
    rank 3   ...                                                       ...

Only numbers are sorted: samples leave a rank in the order in which they lie there, and the index has their positions.
Rounds: one for each segment, after two all_to_all exchanges. Bytes of each rank: on a node its samples, n / p, are read
once and written once; between nodes twice, and sent, less the n / p^2 that stay. Memory beside the samples: one
segment, free in the store or laid out, and spare capacity for random variation.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.storage.compaction import CompactionPlan, Counts, plan_compaction, side_by_side
from unisono.data.storage.ownership import Owners
from unisono.data.storage.sample_store import SampleBuffer, SampleStore
from unisono.world import World


def shuffle(store: SampleStore, owners: Owners) -> None:
    """Move every sample to its new owner. Collective.

    All stores have the same number of segments. Raises PackError on every rank if more samples arrive than
    fit and a node has no more memory.
    """
    world = store.world
    if world.size == 1:
        return
    shortest = np.min_scalar_type(world.size - 1)  # the fastest to search
    to = owners.take(store.numbers).astype(shortest, copy=False)
    sent_counts = store.counts(to)
    received_counts = _transpose(world, sent_counts)
    plan, begins = _plan(store, received_counts)
    parts = np.split(to, (store.cuts[1:-1, 0] - store.cuts[0, 0]).tolist())
    if store.shared:
        for segment in plan.rounds:
            store.copy_segment(segment, parts[segment], store.buffers, begins[:, segment])
            world.barrier()
    else:
        rows, blocks = sent_counts.sum(axis=0).max(axis=0).tolist()
        out = SampleBuffer(np.empty(rows, np.int32), np.empty((blocks, store.block), np.uint8))
        for segment in plan.rounds:
            store.copy_segment(segment, parts[segment], [out] * world.size, side_by_side(sent_counts[:, segment]))
            _exchange(
                world,
                out,
                sent_counts[:, segment],
                store.own,
                plan.destinations[:, segment],
                received_counts[:, segment],
            )
    store.set_segments(plan.cuts, not store.at_start)


def _plan(store: SampleStore, received_counts: Counts) -> tuple[CompactionPlan, Counts]:
    """Return this rank's plan, and where others put its samples, (ranks, segments, 2). Stores grow if necessary."""
    while True:
        plan = plan_compaction(store.cuts, received_counts, store.capacity, store.at_start, not store.shared)
        sent = np.concatenate([plan.destinations, np.broadcast_to(plan.missing, (store.world.size, 1, 2))], axis=1)
        received = _transpose(store.world, sent)
        missing = received[:, -1].max(axis=0)
        if not missing.any():
            return plan, received[:, :-1]
        store.grow(missing)


def _exchange(
    world: World,
    out: SampleBuffer,
    sent_counts: Counts,
    own: SampleBuffer,
    destinations: Counts,
    received_counts: Counts,
) -> None:
    """Send the samples that are laid out; receive samples into these destinations in the store."""
    begins = side_by_side(sent_counts)
    for kind in (0, 1):
        world.all_to_all_v(
            _parts(out[kind], begins[:, kind], sent_counts[:, kind]),
            _parts(own[kind], destinations[:, kind], received_counts[:, kind]),
        )


def _transpose(world: World, array: NDArray[np.int64]) -> NDArray[np.int64]:
    """Send entry r of an array to rank r; return the entries received from all ranks."""
    swapped: NDArray[np.int64] = world.all_to_all(torch.from_numpy(np.ascontiguousarray(array))).numpy()
    return swapped


def _parts(array: NDArray[np.generic], begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[torch.Tensor]:
    whole = torch.from_numpy(array)
    return [whole[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
