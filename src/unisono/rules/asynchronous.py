"""Base of the rules of workers that never wait for one another: servers keep what they share.

    server="rank"     ranks 0 1 2 train, rank 3 serves          servers=2: ranks 0 1 train, ranks 2 3 serve
    server="thread"   ranks 0 1 2 3 train, a thread of rank 0 serves

Several servers each keep a part of the model: the buckets are dealt to them by size. A worker's exchange goes to all of
them at once; each serves whoever comes first. Workers and servers out of step are those of DownPour SGD (Dean et al.
2012); the bound of staleness is that of the stale synchronous parallel server (Ho et al. 2013).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from unisono.errors import UsageError
from unisono.step.layout import Layout
from unisono.step.program import Arrival, RankGroup, Step, StepProgram
from unisono.step.rule import AUTO, BaseRule, Members, RankState, SeatCounts, Traits
from unisono.tables import choice, number

SERVERS = ("rank", "thread")
"""Places of a server: a rank that does nothing else, or a thread beside a worker."""


@dataclass(frozen=True)
class BaseAsynchronousRule(BaseRule, ABC):
    """Rule by which every worker applies its own gradients, and exchanges with servers every `period` steps."""

    period: int = number(1, at_least=1)
    """Steps between two exchanges of a worker."""
    server: str = choice("rank", *SERVERS)
    """Place of the servers: "rank" for the last ranks, which only serve; "thread" for threads of ranks 0, 1, ...."""
    servers: int = number(1, at_least=1)
    """Number of servers; each keeps a part of the model."""
    staleness: int = number(0, at_least=0)
    """Largest number of exchanges of others between two of one worker: faster workers wait for slower ones. 0 is no
    bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange.algorithm != AUTO:
            raise UsageError(
                f"{type(self).__name__}(exchange=Exchange(algorithm={self.exchange.algorithm!r})): workers exchange "
                f"with servers, not by a collective; leave the algorithm at {AUTO!r} (exchange.algorithm in a recipe)"
            )

    @property
    def traits(self) -> Traits:
        """Properties: the weights of workers differ, and each server has a bucket or more."""
        return Traits(RankState.OWN, (self.period,), Members.SERVERS, buckets=self.servers)

    @abstractmethod
    def serve(self, event: Arrival, server: int, layout: Layout, /) -> StepProgram:
        """Return the tasks by which a server serves an exchange."""

    def exchanges(self, event: Step) -> bool:
        """Return True in the last step of each period."""
        return event.synchronize and (event.number + 1) % self.period == 0

    def seats(self, ranks: int) -> SeatCounts:
        """Return the number of workers and servers. Raises UsageError where no rank is left to train."""
        workers = ranks - self.servers if self.server == "rank" else ranks
        if workers < 1 or self.servers > ranks:
            kind = "ranks of their own, beside workers" if self.server == "rank" else "threads, each on another rank"
            raise UsageError(
                f"{type(self).__name__}(server={self.server!r}, servers={self.servers}): servers are {kind}, and "
                f"{ranks} rank{'s are' if ranks > 1 else ' is'} too few: start "
                f"{self.servers + (self.server == 'rank')} or more"
            )
        if 0 < self.staleness < workers - 1:
            raise UsageError(
                f"{type(self).__name__}(staleness={self.staleness}): {workers} workers that take turns already have a "
                f"staleness of {workers - 1}: raise it to that or more"
            )
        return SeatCounts(workers, self.servers)

    def programs(self, layout: Layout, steps: Sequence[Step], seed: int = 0) -> list[StepProgram]:
        """Return the programs of all seats over these steps, with servers that serve in a random order."""
        seats = self.seats(layout.ranks)
        exchanges = [sum(map(self.exchanges, steps))] * seats.workers
        orders = random_arrivals(exchanges, seats.servers, seed)
        return [*super().programs(layout, steps), *serving_programs(self, layout, orders)]

    def keys_of(self, server: int, layout: Layout) -> list[int]:
        """Return the keys of a server's buckets."""
        return [key for key, owner in self.server_of(layout).items() if owner == server]

    def server_of(self, layout: Layout) -> dict[int, int]:
        """Return the server of each key: each bucket goes to the server that has the fewest bytes so far."""
        held = [0] * self.servers
        servers = {}
        for key in layout.keys:
            servers[key] = held.index(min(held))
            held[servers[key]] += layout.bucket(key).nbytes
        return servers

    def pair(self, worker: int, server: int, layout: Layout) -> RankGroup:
        """Return the group of a worker and a server: the seats of both."""
        return RankGroup((worker, self.seats(layout.ranks).workers + server), server)

    @property
    def communicators(self) -> int:
        """Number of threads that exchange: one for each server."""
        return self.servers


def has_servers(rule: BaseRule) -> TypeGuard[BaseAsynchronousRule]:
    return rule.traits.members is Members.SERVERS


def random_arrivals(exchanges: Sequence[int], servers: int, seed: int = 0) -> list[list[int]]:
    """Return, for each server, the workers in the order in which it serves them; worker w has `exchanges[w]` exchanges.

        worker 0   exchange 0 ─────────── exchange 1 ...         server 0 serves    0 1 1 0 ...
        worker 1        exchange 0  exchange 1 ...               server 1 serves    1 0 1 0 ...

    A worker's exchange goes to all servers at once, and the next one begins when all have served it. So the orders of
    two servers differ, but not freely: this one is drawn from those that can happen.

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


def serving_programs(rule: BaseAsynchronousRule, layout: Layout, orders: Sequence[Sequence[int]]) -> list[StepProgram]:
    """Return the program of each server that serves workers in these orders."""
    return [
        tuple(
            task
            for exchange, worker in enumerate(order)
            for task in rule.serve(Arrival(exchange, worker), server, layout)
        )
        for server, order in enumerate(orders)
    ]
