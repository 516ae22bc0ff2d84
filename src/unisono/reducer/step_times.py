"""Measurements of steps: when parameters are needed and gradients ready, and durations of exchanges and updates."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from unisono.engine import OperationSpan
from unisono.reducer.model_collectives import ModelCollectives
from unisono.step.costs import Computing
from unisono.step.operations import BARRIER
from unisono.step.program import UPDATE, Role, Task
from unisono.world import World


class StepTimes:
    """Times of one rank, in seconds. The clock stands still while the rank waits."""

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self.communicating = 0.0
        """Seconds of exchanges, since the start."""
        self.updating = 0.0
        """Seconds of parameter updates, since the start."""
        self.waiting = 0.0
        """Seconds since the start in which this rank computed nothing, as it waited for an exchange or an update."""
        self._exchange_seconds: dict[int, dict[str, float]] = {}  # of the last step, by key and operation
        self._update_seconds: dict[int, float] = {}
        self._began = self.whole = 0.0
        self.needed = self.ready = [0.0] * parameters
        self._seen: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Begin a step. It may be called again before the first gradient; the times of the last step are kept."""
        if self.whole or not self._began:
            self._last = self.needed, self.ready, self.whole
        self._began = self._clock()
        self.needed = [0.0] * self._parameters
        self.ready = [0.0] * self._parameters
        self._seen = set()
        self.whole = 0.0

    def record_read(self, number: int) -> None:
        """Record that a parameter is read. Only the first time in a step counts."""
        if number not in self._seen:
            self._seen.add(number)
            self.needed[number] = self._clock() - self._began

    def record_ready(self, number: int) -> None:
        """Record that a parameter's gradient is ready."""
        self.ready[number] = self.whole = self._clock() - self._began

    def add_waiting(self, since: float) -> None:
        """Add the time from `since` (a time.perf_counter() value) until now to the waiting time."""
        self.waiting += time.perf_counter() - since

    def observe(self, span: OperationSpan) -> None:
        """Record the duration of a task of the step program."""
        task, seconds = span.about, span.end - span.begin
        if not isinstance(task, Task):
            return
        if task.operation.role is not Role.LOCAL and task.operation is not BARRIER:
            self.communicating += seconds
            self._exchange_seconds.setdefault(task.key, {})[task.operation.name] = seconds
        elif task.lane == UPDATE and task.parameters:
            self.updating += seconds
            self._update_seconds[task.key] = seconds

    def computing(self, world: ModelCollectives | World, nbytes: int) -> Computing:
        """Return the last step's times, mean over ranks, for `nbytes` of applied gradients. Called by all together."""
        needed, ready, whole = self._last
        mine = [*needed, *ready, whole, sum(self._update_seconds.values())]
        mean = (world.allreduce(torch.tensor(mine, dtype=torch.float64)) / world.size).tolist()
        whole, update = mean[-2:]
        ready = [
            one or whole for one in mean[self._parameters : -2]
        ]  # a parameter without a gradient counts as ready at the end
        return Computing(tuple(mean[: self._parameters]), tuple(ready), whole, update / nbytes)

    def exchange_seconds(self, world: ModelCollectives | World, keys: Sequence[int]) -> list[float]:
        """Return the seconds of the last step's exchange of each key, all its collectives, as the mean over ranks."""
        mine = torch.tensor([sum(self._exchange_seconds[key].values()) for key in keys], dtype=torch.float64)
        return (world.allreduce(mine) / world.size).tolist()

    def _clock(self) -> float:
        return time.perf_counter() - self.waiting
