"""In which order buckets are exchanged, and what no order can beat.

What is needed first by the next forward pass goes first, among what is there. All ranks have to agree on the order, so
it is planned, once, from what was measured:

    there from    fc8 |  fc7  |  fc6 a b c d         | conv2 | conv1           (backward: the last layer comes first)
    exchanged     fc8 fc7 fc6a fc6b           conv2  conv1 fc6c fc6d ...
    next forward                                           conv1 conv2 ... fc6 fc7 fc8

For the bound gradients can be cut anywhere and an exchange be interrupted at no cost. Then "needed first goes first" is
the earliest due date rule: the worst delay is the smallest of all orders (Jackson 1955, with release times Horn 1974).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from unisono.step.costs import Computing, Cost
from unisono.step.layout import Bucket


def sequence(computing: Computing, loads: Sequence[Bucket], cost: Cost) -> tuple[int, ...]:
    """The order of exchange of these buckets, by number: whenever an exchange ends, the one that is needed first of all
    that are there."""
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
    """Seconds of a step that no overlap, bucket size and order can be below: `sizes` are the parameters' bytes.

    It is computing, and by how much the worst of the weights comes too late for the next forward pass at the least. At
    least the first layer's: its gradient comes when all is computed, and it is needed at once.
    """
    work = [size * cost.a_byte for size in sizes]
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
