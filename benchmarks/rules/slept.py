"""A network whose computing is slept, and steps of EASGD with it: workers and a server without a recipe.

workers   step ─ step ─ ... until `again` is False ─ ENDED ─ DONE
server    serves until all workers have ended; the centre stays for the next measurement
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import unisono
from unisono.asynchronous.decisions import Budget, begin
from unisono.asynchronous.exchange import Centre, WorkerExchange
from unisono.asynchronous.link import MpiPort
from unisono.asynchronous.messages import Kind, Order, WorkerHeader, decode_reply, reply_length
from unisono.asynchronous.server import Server
from unisono.rules import BaseRule
from unisono.rules.asynchronous import BaseAsynchronousRule
from unisono.step.program import Step
from unisono.world import World


class Slept(torch.autograd.Function):
    """Layer that takes as long as computing would, and makes a gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, network: Network, layer: int) -> torch.Tensor:
        """Sleep for a third of the layer's seconds."""
        ctx.shape, ctx.network, ctx.layer = weight.shape, network, layer
        if layer == 0:
            network.begin_pass()
        network.sleep(network.seconds / 3 / len(network.weights))
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Sleep for the other two thirds."""
        if ctx.layer == len(ctx.network.weights) - 1:
            ctx.network.begin_pass()
        ctx.network.sleep(ctx.network.seconds * 2 / 3 / len(ctx.network.weights))
        return gradient, torch.zeros(ctx.shape), None, None


class Network(nn.Module):
    """Layers with so many weights each; a step takes `seconds`, a third forward and two thirds backward.

    A sleep that is too long makes the next one shorter. The clock stands still while a step waits, so that waiting is
    never made up for.
    """

    def __init__(self, sizes: Sequence[int], seconds: float, buffers: int = 0) -> None:
        """Make the layers; `buffers` is the number of running means, as batch norms have them."""
        super().__init__()
        self.seconds = seconds
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        if buffers:
            self.register_buffer("means", torch.zeros(buffers))
        self.waited: Callable[[], float] = lambda: 0.0
        self._due = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one score for each sample."""
        value = inputs
        for layer in range(len(self.weights)):
            value = Slept.apply(value, self.weights[layer], self, layer)
        return value.sum(dim=1)

    def begin_pass(self) -> None:
        """Begin a pass over all layers."""
        self._due = time.perf_counter() - self.waited()

    def sleep(self, seconds: float) -> None:
        """Sleep until a layer's computing is over."""
        self._due += seconds
        time.sleep(max(0.0, self._due - (time.perf_counter() - self.waited())))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels of a step."""
    return torch.ones(1, 1, requires_grad=True), torch.zeros(1)


def trainer_of(network: Network, world: World, rule: BaseRule) -> unisono.Trainer:
    """Return a trainer of the network."""
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    trainer = unisono.Trainer(network, world, rule, optimizer, lambda scores, _: scores.mean())
    network.waited = lambda: trainer.reducer.times.waiting
    return trainer


class ElasticRun:
    """Workers and the server of an elastic rule, made by all ranks together. The server is the last rank."""

    def __init__(self, world: World, rule: BaseAsynchronousRule, network: Network) -> None:
        self.rule, self.network = rule, network
        self.trainer = trainer_of(network, world, rule)
        links = self.trainer.reducer.links
        assert links is not None, "the reducer of an asynchronous rule has links"
        self._links, self._steps = links, 0
        self.workers = links.seats.workers
        self.layout = self.trainer.reducer.programs.layout()
        self._serves = world.rank >= self.workers
        if self._serves:
            self._centre = Centre(self.trainer.reducer.weights.flats())
            self._port = MpiPort(links.comm, self.workers, links.timeout, {})
        else:
            self._exchange = self.trainer.reducer.exchange = WorkerExchange(self.workers)

    def run(self, again: Callable[[int], bool]) -> list[float]:
        """Train until `again`, of the number of steps made, is False; or serve. Return the times of the ends of a
        worker's steps."""
        if self._serves:
            budget = Budget(samples=1 << 40, epochs=1)
            Server(self.rule, 0, self.layout, self._centre, self._port, begin(self.workers), budget).run()
            return []
        ends = list[float]()
        while again(len(ends)):
            self._step()
            ends.append(time.perf_counter())
        self.trainer.wait()
        self._end()
        return ends

    def _step(self) -> None:
        exchanges = self.rule.exchanges(Step(self._steps))
        if exchanges:
            self._exchange.prepare(WorkerHeader(Kind.EXCHANGE, self._steps))
        self.trainer.step(*batch())
        if exchanges:
            self.trainer.reducer.runner.wait_for_replies()
        self._steps += 1

    def _end(self) -> None:
        (link,) = self._links.links
        link.announce(WorkerHeader(Kind.ENDED).encode())
        numbers = torch.empty(reply_length(self.workers), dtype=torch.float64)
        link.receive(numbers)
        if decode_reply(numbers).orders & Order.FETCH:
            link.announce(WorkerHeader(Kind.DONE).encode())


def spread(values: list[float]) -> Mapping[str, float]:
    """Return the median, the smallest and the largest of some values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return {"median": median, "least": ordered[0], "most": ordered[-1]}
