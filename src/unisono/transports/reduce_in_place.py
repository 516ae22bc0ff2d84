"""Schedule `direct` on shared memory: both rounds in one pass, without a copy and with two barriers.

Each rank owns a segment, the chunk of its number. Between the barriers no other rank accesses that segment in any
rank's memory. So each summed block is written to all ranks at once, while it is still in the cache:

    2 ranks            rank 0's memory      rank 1's memory
    segment 0          A  ──────┬─────────  B                 rank 0:  A+B → both
    segment 1          C  ──────┴─────────  D                 rank 1:  C+D → both

Equals the schedule `direct`, bit for bit.

Memory traffic of each rank: n bytes read and n written, as for a copy of n bytes. That is the lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.call import Call
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.signals import Signals

BLOCK_BYTES = 512 << 10
"""Bytes summed at a time: by measurement, the sum is then still cached when it is written to the others."""


def plan_reduce_in_place(views: Sequence[Any], rank: int, itemsize: int, arithmetic: Arithmetic) -> list[Step]:
    """Return the steps of `rank` between the barriers. `views`: payloads of all ranks, of equal length and dtype."""
    start, stop = bounds(len(views[rank]), len(views), rank)
    length = BLOCK_BYTES // itemsize
    steps: list[Step] = []
    for first in range(start, stop, length):
        parts = [view[first : min(stop, first + length)] for view in views]
        steps += arithmetic.reduce(parts, parts[rank], parts[0])  # the result replaces all
        steps += [arithmetic.copy(part, parts[rank]) for index, part in enumerate(parts) if index != rank]
    return steps


def reduce_in_place(steps: Sequence[Step], signals: Signals, call: Call) -> Callable[[], None]:
    """Return a function that sums in place, all ranks together: afterwards every rank's memory holds the sum."""
    barrier = signals.prepare_barrier(call)

    def play() -> None:
        barrier()
        perform(steps)
        barrier()

    return play
