"""Durations of tasks, as operations share them."""

from __future__ import annotations

from unisono.step.costs import Costs, Duration
from unisono.step.program import Task


def free(_: Task, __: Costs) -> Duration:
    """Return a duration of 0: next to a collective, work in a rank's own memory takes no time."""
    return Duration(0.0)


def whole_exchange(task: Task, costs: Costs) -> Duration:
    """Return the duration of an allreduce of the task's bucket. The cost is that of the rule's wire: it counts bytes
    before they are encoded."""
    return costs.exchange(costs.nbytes(task.key), task.group)


def half_exchange(task: Task, costs: Costs) -> Duration:
    """Return half the duration of an allreduce of the task's bucket: half its messages, and each byte is sent once."""
    whole = costs.exchange(costs.nbytes(task.key), task.group)
    return Duration(whole.seconds / 2, whole.link / 2)


def small_exchange(_: Task, costs: Costs) -> Duration:
    """Return the duration of a collective of almost no bytes."""
    return costs.exchange(0)


def latency(_: Task, costs: Costs) -> Duration:
    """Return the latency of a collective."""
    return Duration(costs.collective.latency)
