"""Serial reference of asynchronous rules: workers and servers in one process, in the order of a log or in any other.

orders    [[0, 2, 1, 0, ...]]      the workers, as each server serves them: what a run's event log holds
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unisono.asynchronous.exchange import Centre, Coding, WorkerExchange
from unisono.asynchronous.messages import Reply, WorkerProgress
from unisono.rules.asynchronous import BaseAsynchronousRule, serving_programs
from unisono.step.in_process import Batch, InProcessReplica, Loss, play_programs
from unisono.step.layout import Layout
from unisono.step.program import Step


class InProcessWorker(InProcessReplica):
    """Worker of an asynchronous rule, trained by tasks in the plainest way."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        layout: Layout,
        batches: Sequence[Batch | None],
        exchange: WorkerExchange,
    ) -> None:
        super().__init__(model, optimizer, loss, layout, batches)
        self._exchange = exchange

    def announce(self, server: int, link: Any) -> None:
        """Receive a server's reply: the order of the exchanges is given."""
        self._exchange.announce(server, _Announced(link))

    def swap(self, key: int, link: Any) -> None:
        """Send a bucket and receive the centre's."""
        self._exchange.swap(key, self.bucket(key), link)

    def replied(self) -> None:
        """Do nothing: no server has ordered anything."""

    def pull(self, key: int, alpha: float) -> None:
        """Move the weights of a bucket by the share `alpha` towards the centre."""
        self._exchange.pull(key, self.bucket(key), alpha)
        self.unpack_weights(key)


class _Announced:
    """Link on which the header was sent before."""

    def __init__(self, link: Any) -> None:
        self.receive = link.receive

    def announce(self, _: torch.Tensor) -> None:
        """Do nothing."""


def play_workers_in_process(
    rule: BaseAsynchronousRule,
    workers: Sequence[InProcessWorker],
    orders: Sequence[Sequence[int]],
    steps: Sequence[int],
    codings: Callable[[int], Callable[[int], Coding]] | None = None,
    seed: int = 0,
) -> list[Centre]:
    """Train workers by an asynchronous rule, worker w for `steps[w]` steps, with servers that serve in these orders.

    `codings` returns, for a server, the function that returns the coding of a worker. Return the servers' centres. The
    order of all other tasks is a random one that the programs allow, chosen by `seed`.
    """
    layout, centres = workers[0].layout, list[Centre]()
    for key in layout.keys:
        workers[0].copy_weights(key)
    server_of = rule.server_of(layout)
    for server in range(len(orders)):
        flats = {key: workers[0].bucket(key).clone() for key in layout.keys if server_of[key] == server}
        centre = _ServingInOrder(flats, None if codings is None else codings(server), orders[server])
        centre.reply = Reply(workers=(WorkerProgress(),) * len(workers)).encode()
        centres.append(centre)
    programs = [
        tuple(task for number in range(count) for task in rule(Step(number), seat, layout))
        for seat, count in enumerate(steps)
    ]
    programs += serving_programs(rule, layout, orders)
    play_programs(programs, [*workers, *centres], rule.threads(), seed)
    return centres


class _ServingInOrder(Centre):
    """Centre that knows from an order whom it serves."""

    def __init__(
        self, flats: Mapping[int, torch.Tensor], codings: Callable[[int], Coding] | None, order: Sequence[int]
    ) -> None:
        super().__init__(flats, codings)
        self._order = iter(order)

    def announce(self, number: int, link: Any) -> None:
        self.worker = next(self._order)
        super().announce(number, link)
