"""Where communication sits in the step: what an overlap says of each collective of a step program."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unisono.step.program import COMPUTING, MAIN, Group, Task, order, thread

Place = Callable[[Task, int, int], tuple[Task, ...]]
"""(a collective without lane, group number and order; how many went before it in the step; the most communicators)
-> the tasks that carry it out."""


class Overlap(NamedTuple):
    """Where communication sits in the step (MXNET-MPI section 4 calls it overlap)."""

    place: Place
    by_main: bool = False
    """True where the main thread carries something out: a backward pass that nobody waits for has another thread."""
    several: bool = False
    """True where several collectives may go on at once, each on a communicator of its own."""
    after: bool = False
    """True where nothing is sent before the backward pass has ended."""

    def communicators(self, outstanding: int) -> int:
        """Return how many communicators there are where `outstanding` collectives may go on at once."""
        return outstanding if self.several else 1

    def backward_lane(self, deferred: bool) -> str:
        """Return the lane of backward passes; `deferred`: parameters are waited for when they are read."""
        return COMPUTING if self.by_main and deferred else MAIN


def in_order(task: Task, lane: str, number: int) -> Task:
    """Return a collective on the communicator `number`, after all others there."""
    assert task.group is not None, "a collective has a group"
    group = Group(task.group.ranks, number)
    own = (thread(MAIN),) if lane == MAIN else ()
    return task._replace(lane=lane, writes=(*task.writes, order(number), *own), group=group)
