"""`direct` on memory that lies in a window: both rounds in one sweep, with no copy and two meetings.

Each rank owns a segment, the chunk of its number. Between the meetings nobody else touches that segment, in whoever's
memory it lies, so as soon as a block of it is summed the sum is written to everyone, while it is still in the cache:

    2 ranks            rank 0's memory      rank 1's memory
    segment 0          A  ──────┬─────────  B                 rank 0:  A+B → both
    segment 1          C  ──────┴─────────  D                 rank 1:  C+D → both

Equals the schedule `direct`, bit for bit.

Bytes through memory, for each rank: n read and n written, as many as copying n bytes moves. That is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.call import Call
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.signals import Signals

BLOCK_BYTES = 512 << 10
"""Bytes summed at a time: few enough that the sum is still cached when it is written to the others, by measurement."""


def plan_sweep(views: Sequence[Any], rank: int, itemsize: int, arithmetic: Arithmetic) -> list[Step]:
    """What rank `rank` does between the meetings. `views` holds each rank's payload: same length, same dtype."""
    start, stop = bounds(len(views[rank]), len(views), rank)
    length = BLOCK_BYTES // itemsize
    steps: list[Step] = []
    for first in range(start, stop, length):
        parts = [view[first : min(stop, first + length)] for view in views]
        steps += arithmetic.reduce(parts, parts[rank])
        steps += [arithmetic.copy(part, parts[rank]) for place, part in enumerate(parts) if place != rank]
    return steps


def sweep(steps: Sequence[Step], signals: Signals, what: Call) -> None:
    """Sum in place: afterwards every rank's memory holds the sum. All ranks together."""
    signals.meet(what)
    perform(steps)
    signals.meet(what)
