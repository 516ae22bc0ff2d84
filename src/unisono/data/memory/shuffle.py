"""The shuffle of samples across ranks (DIMD 4.1, Algorithm 2).

What a rank holds is cut into segments. Segment by segment, every rank sorts its samples by who is to hold them, and all
exchange: how many samples and bytes, their numbers, and the samples:

    rank 0   a b c d                 a d | b | c                  a d  g  k          4 ranks, the first segment of each;
    rank 1   e f g h    ──sort──▶    g | e f | | h   ──exchange──▶  b  e f  l          samples of a rank lie in the
    rank 2   i j k l                 k | l | i | j                c  i                order of who sent them
    rank 3   ...

Rounds: 3 exchanges for each segment. Bytes sent by each rank: its samples n / p, less what stays, n / p^2, and 4 for the
number of each. Memory beside what it holds: one segment, since the old one goes before the new one comes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from unisono.data.memory.holding import Holders
from unisono.data.memory.segment import Segment
from unisono.world import World

Lengths = NDArray[np.int32]
"""Bytes of every sample there is."""


def shuffle(world: World, segments: list[Segment], holders: Holders, lengths: Lengths) -> None:
    """Bring every sample in `segments` to the rank of `world` that is to hold it, in place.

    Called by all ranks together, with as many segments each.
    """
    for number in range(len(segments)):
        segments[number] = _exchange(world, *_sorted(segments, number, holders, world.size), lengths)


def _sorted(
    segments: list[Segment], number: int, holders: Holders, ranks: int
) -> tuple[Segment, NDArray[np.int64]]:
    """A segment's samples by who is to hold them, and how many there are for each rank; the segment itself goes."""
    to = holders[segments[number].numbers].astype(np.uint16 if ranks <= 1 << 16 else np.int32)
    send = segments[number].take(np.argsort(to, kind="stable"))
    segments[number] = Segment.empty()
    return send, np.bincount(to, minlength=ranks)


def _exchange(world: World, send: Segment, counts: NDArray[np.int64], lengths: Lengths) -> Segment:
    """What this rank sends, sorted by rank, for what all send to it."""
    rows = np.concatenate([[0], counts.cumsum()])
    places = send.offsets[rows]
    sizes = torch.from_numpy(np.stack([counts, np.diff(places)], axis=1))
    come = world.all_to_all(sizes).numpy().cumsum(axis=0)
    numbers = np.empty(int(come[-1, 0]), np.int32)
    data = np.empty(int(come[-1, 1]), np.uint8)
    _parts(world, send.numbers, rows, numbers, come[:, 0])
    _parts(world, send.data, places, data, come[:, 1])
    offsets = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(lengths[numbers], out=offsets[1:])
    return Segment(numbers, data, offsets)


def _parts(
    world: World,
    send: NDArray[np.generic],
    places: NDArray[np.int64],
    room: NDArray[np.generic],
    ends: NDArray[np.int64],
) -> None:
    """Exchange stretches of one array for stretches of another."""
    world.exchange(_cut(send, places.tolist()), _cut(room, [0, *ends.tolist()]))


def _cut(array: NDArray[np.generic], bounds: list[int]) -> list[torch.Tensor]:
    whole = torch.from_numpy(array)
    return [whole[first:last] for first, last in zip(bounds[:-1], bounds[1:], strict=True)]
