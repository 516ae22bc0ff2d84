"""Order in which buckets are exchanged, and a bound that no order can beat.

Among the buckets that are ready, the one that the next forward pass needs first goes first. All ranks have to use the
same order, so it is planned, once, from measurements:

    ready from    fc8 |  fc7  |  fc6 a b c d         | conv2 | conv1           (backward: the last layer comes first)
    exchanged     fc8 fc7 fc6a fc6b           conv2  conv1 fc6c fc6d ...
    next forward                                           conv1 conv2 ... fc6 fc7 fc8

The bound assumes that gradients can be cut anywhere and that an exchange can be interrupted at no cost. Then "needed
first goes first" is the earliest due date rule: the worst delay is the smallest of all orders (Jackson 1955, with
release times Horn 1974).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from unisono.step.costs import Computing, Cost
from unisono.step.layout import Bucket


def sequence(computing: Computing, loads: Sequence[Bucket], cost: Cost) -> tuple[int, ...]:
    """Return the order of exchange of these buckets, by number. Whenever an exchange ends, the ready bucket that is
    needed first goes next."""
    there = [max(computing.ready[parameter] for parameter in load.parameters) for load in loads]
    due = [min(computing.needed[parameter] for parameter in load.parameters) for load in loads]
    coming = sorted(range(len(loads)), key=lambda number: (there[number], number))
    waiting: list[tuple[float, int]] = []
    order: list[int] = []
    now, seen = 0.0, 0
    while len(order) < len(loads):
        if not waiting:
            now = max(now, there[coming[seen]])
        while seen < len(coming) and there[coming[seen]] <= now:
            heapq.heappush(waiting, (due[coming[seen]], coming[seen]))
            seen += 1
        _, chosen = heapq.heappop(waiting)
        order.append(chosen)
        now += cost.seconds(loads[chosen].nbytes)
    return tuple(order)


def bound(computing: Computing, sizes: Sequence[int], cost: Cost) -> float:
    """Return the seconds that no overlap, bucket size and order can beat; `sizes` are the parameters' bytes.

    They are the computing time plus the smallest possible delay of the latest weights in the next forward pass. At
    least the first layer is delayed: its gradient comes when all is computed, and its weights are needed at once.
    """
    work = [size * cost.per_byte for size in sizes]
    coming = sorted(range(len(sizes)), key=lambda number: computing.ready[number])
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
