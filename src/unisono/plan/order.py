"""Order in which buckets are exchanged, and a bound that no order can beat.

Among the buckets that are ready, the one that the next forward pass needs first goes first. All ranks have to use the
same order, so it is planned, once, from measurements:

    ready from    fc8 |  fc7  |  fc6 a b c d         | conv2 | conv1           (backward: the last layer comes first)
    exchanged     fc8 fc7 fc6a fc6b           conv2  conv1 fc6c fc6d ...
    next forward                                           conv1 conv2 ... fc6 fc7 fc8

A sharded rule exchanges each bucket in two halves (r reduce-scatter, g all-gather), which go by the same rule: what
the link would do later goes where it would be idle:

    exchanged     r8 r7 r6a r6b g6a g7 g8      r2 g2  r1 g1 g6b ...

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
    return _serve(computing, loads, [cost.seconds(load.nbytes) for load in loads])


def sequence_of_halves(
    computing: Computing, loads: Sequence[Bucket], cost: Cost, updated_share: float
) -> tuple[int, ...]:
    """Return the order of exchange of these buckets in halves: each number twice, the first time for its
    reduce-scatter, the second for its all-gather.

    An all-gather is ready when `updated_share` of its bucket has been updated. So the link gathers the weights of large
    last layers while earlier gradients are still computed, and has nothing of them left after the first layers'.
    """
    taken = [cost.seconds(load.nbytes) / 2 for load in loads]
    return _serve(computing, loads, taken, [load.nbytes * computing.update * updated_share for load in loads])


def _serve(
    computing: Computing, loads: Sequence[Bucket], taken: Sequence[float], between: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Return the order in which a link serves buckets for `taken` seconds each: the earliest due date first.

    With `between` it serves each twice, with at least these seconds from the end of the first time to the second. For
    the second it waits if that is more urgent than what is there, and comes before the end of what is there.
    """
    due = [min(computing.needed[parameter] for parameter in load.parameters) for load in loads]
    coming = [(max(computing.ready[one] for one in load.parameters), 0, at) for at, load in enumerate(loads)]
    heapq.heapify(coming)
    waiting: list[tuple[float, int, int]] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            _, turn, number = heapq.heappop(coming)
            heapq.heappush(waiting, (due[number], turn, number))
        first, _, number = waiting[0]
        ends = now + taken[number]
        second = coming if between is not None else ()  # nothing is served twice without it
        if urgent := [there for there, turn, other in second if turn and due[other] < first and there < ends]:
            now = min(urgent)
            continue
        _, turn, number = heapq.heappop(waiting)
        order.append(number)
        now += taken[number]
        if between is not None and not turn:
            heapq.heappush(coming, (now + between[number], 1, number))
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
