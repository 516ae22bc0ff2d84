"""Orders in which servers serve workers, and the programs of all seats that follow from them.

    worker 0   exchange 0 ─────────── exchange 1 ...         server 0 serves    0 1 1 0 ...
    worker 1        exchange 0  exchange 1 ...               server 1 serves    1 0 1 0 ...

A worker's exchange goes to all servers at once, and the next one begins when all have served it. So the orders of two
servers differ, but not freely: `random_arrivals` draws from those that can happen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from unisono.step.layout import Layout
from unisono.step.program import Arrival, Step, StepProgram
from unisono.step.rule import AsynchronousRule, Rule


def random_arrivals(exchanges: Sequence[int], servers: int, seed: int = 0) -> list[list[int]]:
    """Return, for each server, the workers in the order in which it serves them; worker w has `exchanges[w]` exchanges.

    >>> random_arrivals([2, 1], 1)
    [[1, 0, 0]]
    """
    chance = random.Random(seed)
    orders: list[list[int]] = [[] for _ in range(servers)]
    left = list(exchanges)
    waiting = {worker: set(range(servers)) for worker, count in enumerate(left) if count}
    while waiting:
        worker = chance.choice(sorted(waiting))
        server = chance.choice(sorted(waiting[worker]))
        orders[server].append(worker)
        waiting[worker].discard(server)
        if not waiting[worker]:
            left[worker] -= 1
            del waiting[worker]
            if left[worker]:
                waiting[worker] = set(range(servers))
    return orders


def serving_programs(rule: AsynchronousRule, layout: Layout, orders: Sequence[Sequence[int]]) -> list[StepProgram]:
    """Return the program of each server that serves workers in these orders."""
    return [
        tuple(
            task for number, worker in enumerate(order) for task in rule.serve(Arrival(number, worker), server, layout)
        )
        for server, order in enumerate(orders)
    ]


def programs_of(rule: Rule, layout: Layout, steps: Sequence[Step], seed: int = 0) -> list[StepProgram]:
    """Return the programs of all ranks over these steps; for an asynchronous rule those of all seats, with servers that
    serve in a random order that `seed` chooses."""
    if not isinstance(rule, AsynchronousRule) or not rule.asynchronous:
        return [tuple(task for event in steps for task in rule(event, rank, layout)) for rank in range(layout.ranks)]
    seats = rule.seats(layout.ranks)
    workers = [tuple(task for event in steps for task in rule(event, seat, layout)) for seat in range(seats.workers)]
    exchanges = [sum(map(rule.exchanges, steps))] * seats.workers
    return [*workers, *serving_programs(rule, layout, random_arrivals(exchanges, seats.servers, seed))]
