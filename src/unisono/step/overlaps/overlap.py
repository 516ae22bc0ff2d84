"""Overlap of communication and computing: it places each collective of a step program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unisono.step.program import COMPUTING, MAIN, RankGroup, Task, order, thread

PlaceTask = Callable[[Task, int, int], tuple[Task, ...]]
"""Function (a collective without lane, group number and order; the number of collectives before it in the step; the
largest number of communicators) -> the tasks that run it."""


class Overlap(NamedTuple):
    """Place of communication in the step (MXNET-MPI section 4 calls it embedding)."""

    place: PlaceTask
    by_main: bool = False
    """True where the main thread runs collectives or barriers: a deferred backward pass then has another thread."""
    several: bool = False
    """True where several collectives may run at once, each on its own communicator."""
    after: bool = False
    """True where nothing is sent before the backward pass has ended."""

    def communicators(self, outstanding: int) -> int:
        """Return the number of communicators for at most `outstanding` collectives at once."""
        return outstanding if self.several else 1

    def backward_lane(self, deferred: bool) -> str:
        """Return the lane of backward passes. `deferred`: True where parameters are waited for when they are read."""
        return COMPUTING if self.by_main and deferred else MAIN


def in_order(task: Task, lane: str, number: int) -> Task:
    """Return a collective on the communicator `number`, after all others there."""
    assert task.group is not None, "a collective has a group"
    group = RankGroup(task.group.ranks, number)
    own = (thread(MAIN),) if lane == MAIN else ()
    return task._replace(lane=lane, writes=(*task.writes, order(number), *own), group=group)
