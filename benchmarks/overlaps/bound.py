"""Bound of a step that no overlap, bucket size and order of exchange can beat.

It assumes that gradients can be cut anywhere and that an exchange can be interrupted at no cost. Then "needed first
goes first" is the earliest due date rule: the worst delay is the smallest of all orders (Jackson 1955, with release
times Horn 1974).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from unisono.step.costs import Computing, Cost


def bound(computing: Computing, sizes: Sequence[int], cost: Cost) -> float:
    """Return the seconds that no overlap, bucket size and order can beat; `sizes` are the parameters' bytes.

    They are the computing time plus the smallest possible delay of the latest weights in the next forward pass. At
    least the first layer is delayed: its gradient comes when all is computed, and its weights are needed at once.
    """
    work = [size * cost.per_byte for size in sizes]
    coming = sorted(range(len(sizes)), key=lambda layer: computing.ready[layer])
    waiting: list[tuple[float, int]] = []
    now, late, seen = 0.0, 0.0, 0
    left = list(work)
    while seen < len(coming) or waiting:
        if not waiting:
            now = max(now, computing.ready[coming[seen]])
        while seen < len(coming) and computing.ready[coming[seen]] <= now:
            heapq.heappush(waiting, (computing.needed[coming[seen]], coming[seen]))
            seen += 1
        due, first = waiting[0]
        until = computing.ready[coming[seen]] if seen < len(coming) else float("inf")
        spent = min(left[first], until - now)
        left[first] -= spent
        now += spent
        if left[first] <= 0 or now + left[first] == now:
            heapq.heappop(waiting)
            late = max(late, now - (computing.whole + due))
    return computing.whole + late
