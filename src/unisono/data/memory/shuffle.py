"""Shuffle of samples across ranks (DIMD 4.1, Algorithm 2).

The samples of a rank are cut into segments. First the ranks exchange how much each sends to each, so that every rank
knows where all samples will lie (`sliding.py`). Then, segment by segment, each sample goes to the rank that is to hold
it. On one node its sender copies it there; between nodes samples are laid out by receiver and sent:

    rank 0   a b c d                 a d | b | c |                     a d  g  k     4 ranks, the first segment of each;
    rank 1   e f g h    ──lay──▶     g | e f | | h    ──exchange──▶    b  e f  l     what comes lies in the order of
    rank 2   i j k l                 k | l | i | j                     c  i          who gave it
    rank 3   ...                                                       ...

Only numbers are sorted: samples leave a rank in the order in which they lie there, and the index has their places.
Rounds: one for each segment, after two all_to_all exchanges. Bytes of each rank: on a node its samples, n / p, are read
once and written once; between nodes twice, and sent, less the n / p^2 that stay. Memory beside the samples: one
segment, free on the shelf or laid out, and room for random variation.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.memory.holding import Holders
from unisono.data.memory.shelf import Place, Shelf
from unisono.data.memory.sliding import Counts, Plan, side_by_side, slide
from unisono.world import World


def shuffle(shelf: Shelf, holders: Holders) -> None:
    """Bring every sample on the shelves to the rank that is to hold it. Collective.

    All shelves have the same number of segments. Raises PackError on every rank if more samples arrive than there is
    room for and a node has no more memory.
    """
    world = shelf.world
    if world.size == 1:
        return
    shortest = np.min_scalar_type(world.size - 1)  # looked through fastest
    to = holders.take(shelf.numbers).astype(shortest, copy=False)
    goes = shelf.counts(to)
    comes = _swap(world, goes)
    plan, begins = _agree(shelf, comes)
    parts = np.split(to, (shelf.cuts[1:-1, 0] - shelf.cuts[0, 0]).tolist())
    if shelf.shared:
        for segment in plan.rounds:
            shelf.lay(segment, parts[segment], shelf.places, begins[:, segment])
            world.barrier()
    else:
        rows, blocks = goes.sum(axis=0).max(axis=0).tolist()
        out = Place(np.empty(rows, np.int32), np.empty((blocks, shelf.block), np.uint8))
        for segment in plan.rounds:
            shelf.lay(segment, parts[segment], [out] * world.size, side_by_side(goes[:, segment]))
            _exchange(world, out, goes[:, segment], shelf.own, plan.places[:, segment], comes[:, segment])
    shelf.hold(plan.cuts, not shelf.low)


def _agree(shelf: Shelf, comes: Counts) -> tuple[Plan, Counts]:
    """Return this rank's plan, and where others put its samples, (ranks, segments, 2). Shelves grow if necessary."""
    while True:
        plan = slide(shelf.cuts, comes, shelf.room, shelf.low, not shelf.shared)
        told = np.concatenate([plan.places, np.broadcast_to(plan.short, (shelf.world.size, 1, 2))], axis=1)
        heard = _swap(shelf.world, told)
        short = heard[:, -1].max(axis=0)
        if not short.any():
            return plan, heard[:, :-1]
        shelf.grow(short)


def _exchange(world: World, out: Place, goes: Counts, own: Place, places: Counts, comes: Counts) -> None:
    """Send the samples that are laid out; receive samples into these places on the shelf."""
    begins = side_by_side(goes)
    for kind in (0, 1):
        world.all_to_all_v(
            _parts(out[kind], begins[:, kind], goes[:, kind]),
            _parts(own[kind], places[:, kind], comes[:, kind]),
        )


def _swap(world: World, array: NDArray[np.int64]) -> NDArray[np.int64]:
    """Send entry r of an array to rank r; return the entries received from all ranks."""
    swapped: NDArray[np.int64] = world.all_to_all(torch.from_numpy(np.ascontiguousarray(array))).numpy()
    return swapped


def _parts(array: NDArray[np.generic], begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[torch.Tensor]:
    whole = torch.from_numpy(array)
    return [whole[begin : begin + size] for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)]
