"""The shuffle of samples across ranks (DIMD 4.1, Algorithm 2).

What a rank holds is cut into segments. Segment by segment, every rank lays its samples out by who is to hold them, and
all take what is laid out for them:

    rank 0   a b c d                 a d | b | c |                a d  g  k          4 ranks, the first segment of each;
    rank 1   e f g h    ──lay──▶     g | e f | | h    ──take──▶   b  e f  l          samples of a rank lie in the
    rank 2   i j k l                 k | l | i | j                c  i               order of who gave them
    rank 3   ...                                                  ...

Rounds: one for each segment. Bytes given by each rank: its samples n / p, less what stays, n / p^2. Memory beside what
it holds: one segment, the shelf, since what comes lies where what went has lain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.memory.holding import Holders
from unisono.data.memory.segment import SLACK, Segment
from unisono.data.memory.shelf import Shelf
from unisono.world import World

Lengths = NDArray[np.int32]
"""Bytes of every sample there is."""


def shuffle(
    world: World, segments: list[Segment], holders: Holders, lengths: Lengths, shelf: Shelf | None = None
) -> Shelf:
    """Bring every sample in `segments` to the rank of `world` that is to hold it, in place.

    Called by all ranks together, with as many segments each. Returns the shelf for the next time; it is another one
    where the one that is given (which is then freed) is too small.
    """
    shelf = _large_enough(world, segments, shelf)
    shortest = np.min_scalar_type(world.size)  # sorts fastest
    for number, segment in enumerate(segments):
        to = holders[segment.numbers].astype(shortest)
        shelf.lay_out(segment, to)
        segments[number] = shelf.take(segment.data, lengths)
    return shelf


def _large_enough(world: World, segments: list[Segment], shelf: Shelf | None) -> Shelf:
    """A shelf that takes each segment of each rank: every segment of now, whatever goes before it."""
    own = [(len(segment), segment.nbytes) for segment in segments]
    samples, nbytes = np.max([sizes for each in world.gather(own) for sizes in each], axis=0).tolist()
    if shelf is not None and samples <= shelf.samples and nbytes <= shelf.nbytes:
        return shelf
    if shelf is not None:
        shelf.free()
    return Shelf(world, int(SLACK * samples) + 1, int(SLACK * nbytes) + 1)
