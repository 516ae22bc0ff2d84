"""Overhead of an exchange with a server: EASGD at several periods, and a server that visits workers in turn.

unisono lab --hosts 8 --rate 40mbit -- python benchmarks/rules/server.py OUT.json 40000000 500000 0.66

The numbers are the rate of a link in bits a second, the bytes of the model and the seconds of a step's slept computing.
The last host serves.

overhead     (time of a step - that of a step without any exchange), as the mean over all steps of a period and workers
round robin  the server receives x of worker 0, moves c, sends c back, then worker 1 ...; the worker waits
predicted    the programs of all seats on a clock, at the cost of a swap that was measured before
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from operator import gt
from pathlib import Path
from typing import Any

import torch
from slept import ElasticRun, Network, batch, spread

import unisono
from unisono.asynchronous.link import MpiLink
from unisono.rules import EASGD
from unisono.rules.asynchronous import serving_programs
from unisono.step import operations as op
from unisono.step.costs import Computing, Cost, Costs, fit
from unisono.step.layout import Layout
from unisono.step.predict import Clock
from unisono.step.program import Step
from unisono.world import World

LAYERS, BUCKETS = 10, 5
PERIODS = (1, 4, 16)
WARM, TIMED = {1: 4, 4: 2, 16: 1}, {1: 10, 4: 5, 16: 2}
"""Exchanges of a worker that are not timed, and those that are, by period."""

ALPHA = 0.1
ROUNDS = 3

SWAPS = 8
"""Swaps of a measurement of their cost, one after another."""


def step_time(ends: Sequence[float], period: int) -> float:
    """Return the mean time of a step from the ends of a worker's steps."""
    first, steps = WARM[period] * period, TIMED[period] * period
    return (ends[first + steps] - ends[first]) / steps


def steps_of(period: int) -> int:
    """Return the number of steps of a measurement."""
    return (WARM[period] + TIMED[period]) * period + 1


class RoundRobin:
    """Workers and a server that visits them in turn. Nothing overlaps."""

    def __init__(self, world: World, network: Network) -> None:
        self._workers, self._serves = world.size - 1, world.rank == world.size - 1
        comm = world.dup().comm
        self._links = [MpiLink(comm, worker, worker=False, timeout=60) for worker in range(self._workers)]
        self._link = MpiLink(comm, self._workers, worker=True, timeout=60)
        self._network = network
        self._sizes = [weight.numel() for weight in network.weights]
        self._flat = torch.zeros(sum(self._sizes))

    def run(self, period: int) -> list[float]:
        """Make a measurement's steps, or serve them. Return the ends of a worker's steps."""
        came, steps = torch.empty_like(self._flat), steps_of(period)
        if self._serves:
            for _ in range(steps // period):
                for link in self._links:
                    link.receive(came)
                    self._flat.add_(came.sub_(self._flat), alpha=ALPHA)
                    link.send(self._flat)
            return []
        optimizer, ends = torch.optim.SGD(self._network.parameters(), 1e-3), list[float]()
        for step in range(steps):
            inputs, _ = batch()
            self._network(inputs).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ends.append(time.perf_counter())
            if (step + 1) % period == 0:
                torch.cat([weight.detach() for weight in self._network.weights], out=self._flat)
                self._link.send(self._flat)
                self._link.receive(came)
                self._flat.sub_(came)
                with torch.no_grad():
                    for weight, part in zip(self._network.weights, self._flat.split(self._sizes), strict=True):
                        weight.sub_(part, alpha=ALPHA)
        return ends


def swap_cost(world: World, largest: int) -> Cost:
    """Return the cost of a swap between worker 0 and the server: of several, one after another, nothing beside them.

    A shaped link makes up for the gaps between them with its burst, so the cost of a single small one would not do.
    """
    comm, last = world.dup().comm, world.size - 1
    taking_part = world.rank in (0, last)
    link = MpiLink(comm, last - world.rank, world.rank == 0, 60) if taking_part else None
    sizes, took = list[float](), list[float]()
    for nbytes in (largest // 4, largest // 2, largest):
        sent, received = torch.zeros(nbytes // 4), torch.empty(nbytes // 4)
        each = list[float]()
        for _ in range(7):
            world.barrier()
            began = time.perf_counter()
            for _ in range(SWAPS if link else 0):
                link.swap(sent, received)
            each.append(max(world.all_gather_object(time.perf_counter() - began if link else 0.0)) / SWAPS)
        sizes.append(nbytes)
        took.append(statistics.median(each))
    return fit(sizes, took)


def predicted(layout: Layout, rules: dict[int, EASGD], cost: Cost, workers: int, computing: float) -> dict[int, float]:
    """Return the predicted overhead of a step, by period."""
    needed = tuple(computing / 3 * layer / LAYERS for layer in range(LAYERS))
    ready = tuple(computing * (1 / 3 + 2 / 3 * (LAYERS - layer) / LAYERS) for layer in range(LAYERS))
    costs, overheads = Costs(layout, Computing(needed, ready, computing), cost), {}
    for period, rule in rules.items():
        steps = [Step(step) for step in range(steps_of(period))]
        order = list(range(workers)) * sum(map(rule.exchanges, steps))
        programs = [tuple(task for step in steps for task in rule(step, seat, layout)) for seat in range(workers)]
        programs += serving_programs(rule, layout, [order])
        spans = Clock(
            dict(enumerate(programs)), rule.threads(), lambda _, task: task.operation.price(task, costs)
        ).run()
        each = []
        for worker in range(workers):
            ends = sorted(span.end for span in spans if span.rank == worker and span.task.operation is op.END)
            each.append(step_time(ends, period) - computing)
        overheads[period] = statistics.mean(each)
    return overheads


def main(output: str, rate: str, model_bytes: str, computing: str) -> None:
    """Measure both servers at each period by turns."""
    world = unisono.init()
    workers, size, seconds = world.size - 1, int(model_bytes) // 4 // LAYERS, float(computing)
    sizes = (size,) * LAYERS
    exchange = unisono.Exchange(bucket_bytes=4 * size * LAYERS // BUCKETS)
    rules = {period: EASGD(exchange, "chain", alpha=ALPHA, period=period) for period in PERIODS}
    runs = {period: ElasticRun(world, rule, Network(sizes, seconds)) for period, rule in rules.items()}
    peer = RoundRobin(world, Network(sizes, seconds))
    never = ElasticRun(world, EASGD(exchange, "chain", alpha=ALPHA, period=1 << 20), Network(sizes, seconds))
    cost = swap_cost(world, 4 * size * LAYERS // BUCKETS)
    results: dict[str, Any] = {
        **{"hosts": world.size, "rate_bits": float(rate), "computing_s": seconds, "bytes": 4 * sum(sizes)},
        **{"swap_latency_s": cost.latency, "swap_seconds_per_byte": cost.per_byte, "buckets": len(runs[1].layout.keys)},
        "predicted_s": predicted(runs[1].layout, rules, cost, workers, seconds),
        "without_exchange_s": [],
        **{name: {period: [] for period in PERIODS} for name in ("EASGD_s", "round_robin_s")},
    }

    def mean(value: float) -> float:
        return statistics.mean(world.all_gather_object(value)[:workers])

    for _ in range(ROUNDS):
        world.barrier()
        ends = never.run(lambda done: done < 21)
        without = mean((ends[20] - ends[0]) / 20 if ends else 0.0)
        results["without_exchange_s"].append(without)
        for period in PERIODS:
            world.barrier()
            ends = runs[period].run(partial(gt, steps_of(period)))
            results["EASGD_s"][period].append(mean(step_time(ends, period) if ends else 0.0) - without)
            world.barrier()
            ends = peer.run(period)
            results["round_robin_s"][period].append(mean(step_time(ends, period) if ends else 0.0) - without)
            if world.rank == 0:
                last = {name: round(results[name][period][-1], 4) for name in ("EASGD_s", "round_robin_s")}
                print(f"period {period}: {last}, predicted {results['predicted_s'][period]:.4f}", flush=True)
                Path(output).write_text(json.dumps(results, indent=1) + "\n")
    if world.rank == 0:
        for name in ("EASGD_s", "round_robin_s"):
            results[f"{name}_spread"] = {period: spread(each) for period, each in results[name].items()}
        Path(output).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
