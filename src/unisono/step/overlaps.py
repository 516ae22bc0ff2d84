"""Overlaps of communication and computing: each places the collectives of a step program (MXNET-MPI section 4).

Chain: all work is offloaded, and a dummy value keeps the collectives in order (dependency chaining, section 4.3).

    lane main            backward 1   backward 2   backward 3
    lane update                   pack 1       pack 2 ...        set_grads 1  set_grads 2
    lane communication                  allreduce 1 ─order▶ allreduce 2 ─order▶ allreduce 3

The main thread waits for nothing. Packing, the collective and setting the gradients are separate tasks, so each
begins as soon as it can. The collectives run in the order of the program, the same on all ranks, whichever is ready
first.

Concurrent communicators: collectives use K of them in turn, one at a time on each (section 4.2).

    communicator 0   [allreduce 0]   │          [allreduce 2]  │           K = 2: at most two at once
    communicator 1     [allreduce 1] │     [allreduce 3]       │
    main thread                      │ barrier                 │ barrier   before the third, before the fifth

Collectives of one communicator keep the order of the program. Different communicators need no order, so a long
collective delays only those behind it on its own. The barrier limits how far the ranks drift apart, and costs the wait
for the slowest.

Funnel: the main thread runs each collective when its bucket is ready (section 4.1).

    lane computing   backward 1   backward 2   backward 3
    lane update               pack 1       pack 2 ...
    lane main                       [allreduce 1][allreduce 2][allreduce 3]     one at a time

The order of the main thread is the order of the collectives, the same on all ranks. Any MPI library will do, as no
other thread calls it. But while the main thread waits for one bucket, others that are ready wait as well.

None: the main thread runs all collectives once the backward pass has ended. Baseline of the others.

    lane main    ──backward──▶│ [allreduce 1][allreduce 2][allreduce 3]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.step.operations import BARRIER
from unisono.step.program import COMMUNICATION, COMPUTING, MAIN, RankGroup, Task, order, thread

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


def find_overlap(name: str) -> Overlap:
    """Return the overlap of that name. Raises UsageError, listing the names, for an unknown one."""
    if name not in OVERLAPS:
        raise UsageError(f"there is no overlap {name!r}; there are {', '.join(OVERLAPS)}")
    return OVERLAPS[name]


def _on_its_thread(task: Task, _: int, __: int) -> tuple[Task, ...]:
    """Return the task that runs a collective on the communication thread, after those before it."""
    return (_in_order(task, COMMUNICATION, 0),)


def _on_communicators(task: Task, before: int, outstanding: int) -> tuple[Task, ...]:
    """Return the tasks that run a collective on its communicator's thread. After every `outstanding` of them a barrier
    waits for all under way."""
    placed = _in_order(task, COMMUNICATION, before % outstanding)
    if not before or before % outstanding:
        return (placed,)
    barrier = _in_order(Task(BARRIER, task.key, MAIN, group=task.group), MAIN, 0)
    others = tuple(order(number) for number in range(1, outstanding))
    return barrier._replace(writes=(*barrier.writes, *others)), placed


def _on_main(task: Task, _: int, __: int) -> tuple[Task, ...]:
    """Return the task that runs a collective on the main thread."""
    return (_in_order(task, MAIN, 0),)


def _in_order(task: Task, lane: str, number: int) -> Task:
    """Return a collective on the communicator `number`, after all others there."""
    assert task.group is not None, "a collective has a group"
    group = RankGroup(task.group.ranks, number)
    own = (thread(MAIN),) if lane == MAIN else ()
    return task._replace(lane=lane, writes=(*task.writes, order(number), *own), group=group)


OVERLAPS: Mapping[str, Overlap] = {
    "funnel": Overlap(_on_main, by_main=True),
    "concurrent": Overlap(_on_communicators, by_main=True, several=True),
    "chain": Overlap(_on_its_thread),
    "none": Overlap(_on_main, by_main=True, after=True),
}
"""Overlaps by name."""
