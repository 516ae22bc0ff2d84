"""Measurement of the period of a rule with `every = "auto"`, in the first steps.

    step 0, 1, 2, 3     each rank trains alone                    seconds of a step: the median of all but the first
    before step 4       all buckets are exchanged, three times    seconds of an exchange: the fastest of the last two
    from step 4 on      periods of the smallest length of which the exchange hides (`rules/period.py`)

The slowest rank's seconds count, so all ranks find the same period.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from unisono.reducer.bucket_memory import BucketMemory
from unisono.reducer.model_collectives import ModelCollectives
from unisono.rules import BaseRule
from unisono.step.program import UPDATE, Task
from unisono.step.rule_memory import RuleMemory
from unisono.world import World

MEASURED_STEPS = 4
"""Steps before the period is chosen; the first is not measured."""

EXCHANGES = 3
"""Exchanges of all buckets; the first, which plans its collectives, is not measured."""


class TrialReplica(NamedTuple):
    """Replica for exchanges whose result is not used."""

    memory: BucketMemory
    kept: RuleMemory

    def bucket(self, key: int) -> torch.Tensor:
        """Return the elements of a bucket that are sent."""
        return self.memory.elements(self.memory.bucket_slice(key))


class PeriodSearch:
    """Search for the period. Every rank asks at each step, all together."""

    def __init__(self, rule: BaseRule, memory: BucketMemory, collectives: ModelCollectives) -> None:
        self._rule, self._memory, self._collectives = rule, memory, collectives
        self._begins: list[float] = []

    def next_step(self) -> tuple[BaseRule, str] | None:
        """Begin a step, while nothing is running. Return the rule with its period and a line to report, once it is
        known."""
        self._begins.append(time.perf_counter())
        if len(self._begins) <= MEASURED_STEPS:
            return None
        mine = [median(end - begin for begin, end in pairwise(self._begins[1:])), self._exchange_seconds()]
        slowest = self._collectives.allreduce(torch.tensor(mine, dtype=torch.float64), op="maximum")
        computing, exchange = slowest.tolist()
        period = self._rule.smallest_period(computing, exchange)
        line = (
            f"every = {period}: the smallest period whose exchange hides; a step takes {computing * 1e3:.1f} ms, "
            f"an exchange of all weights {exchange * 1e3:.1f} ms"
        )
        return self._rule.with_period(period), line

    def _exchange_seconds(self) -> float:
        """Return the seconds in which all buckets are exchanged, one after another; 0 for a rank alone."""
        if self._collectives.size == 1:
            return 0.0
        operation, trial = self._rule.exchange_operation, TrialReplica(self._memory, RuleMemory())
        tasks = [Task(operation, key, UPDATE) for key in range(1, len(self._memory.layout.buckets) + 1)]

        def exchange(world: World) -> float:
            seconds = []
            for _ in range(EXCHANGES):
                world.barrier()
                began = time.perf_counter()
                for task in tasks:
                    assert operation.act is not None, "an exchange is carried out by ranks"
                    operation.act(trial, task, world)
                seconds.append(time.perf_counter() - began)
            return min(seconds[1:])

        with torch.no_grad():
            return self._collectives.call(exchange)
