"""`direct` on memory that lies in a window: both rounds in one sweep, with no copy and two meetings.

Each rank owns a segment, the chunk of its number. Between the meetings nobody else touches that segment, in whoever's
memory it lies, so as soon as a block of it is summed the sum is written to everyone, while it is still in the cache:

    2 ranks            rank 0's memory      rank 1's memory
    segment 0          A  ──────┬─────────  B                 rank 0:  A+B → both
    segment 1          C  ──────┴─────────  D                 rank 1:  C+D → both

Bytes through memory, for each rank: n read and n written, as many as copying n bytes moves. That is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.schedules.pieces import bounds
from unisono.schedules.schedule import Program, add, receive, send
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.windows import Call, Signals

BLOCK = 512 << 10
"""Bytes summed at a time: few enough that the sum is still cached when it is written to the others, by measurement."""


def can_sweep(program: Program, rank: int, ranks: int) -> bool:
    """Whether the program sums the own chunk, gives it to all and does nothing else: then a sweep does the same."""
    others = [peer for peer in range(ranks) if peer != rank]
    collect = {send(peer, peer) for peer in others} | {add(peer, rank) for peer in others}
    give = {send(peer, rank) for peer in others} | {receive(peer, peer) for peer in others}
    return [set(transfers) for lane in program.lanes for transfers in lane] == [collect, give]


def plan_sweep(views: Sequence[Any], rank: int, itemsize: int, arithmetic: Arithmetic) -> list[Step]:
    """What rank `rank` does between the meetings. `views` holds each rank's payload: same length, same dtype."""
    start, stop = bounds(len(views[rank]), len(views), rank)
    length = BLOCK // itemsize
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
