"""Concurrent communicators: collectives use K of them in turn, one at a time on each (MXNET-MPI section 4.2).

    communicator 0   [allreduce 0]   │          [allreduce 2]  │           K = 2: at most two at once
    communicator 1     [allreduce 1] │     [allreduce 3]       │
    main thread                      │ barrier                 │ barrier   before the third, before the fifth

Collectives of one communicator keep the order of the program. Different communicators need no order, so a long
collective delays only those behind it on its own. The barrier limits how far the ranks drift apart, and costs the wait
for the slowest.
"""

from unisono.step.operations import BARRIER
from unisono.step.overlaps.overlap import Overlap, in_order
from unisono.step.program import COMMUNICATION, MAIN, Task, order


def place(task: Task, before: int, outstanding: int) -> tuple[Task, ...]:
    """Return the tasks that run a collective on its communicator's thread. After every `outstanding` of them a barrier
    waits for all under way."""
    placed = in_order(task, COMMUNICATION, before % outstanding)
    if not before or before % outstanding:
        return (placed,)
    barrier = in_order(Task(BARRIER, task.key, MAIN, group=task.group), MAIN, 0)
    others = tuple(order(number) for number in range(1, outstanding))
    return barrier._replace(writes=(*barrier.writes, *others)), placed


concurrent = Overlap(place, by_main=True, several=True)
