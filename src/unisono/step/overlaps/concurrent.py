"""Concurrent communicators: collectives are dealt to K of them, and one may go on on each (MXNET-MPI section 4.2).

    communicator 0   [allreduce 0]   │          [allreduce 2]  │           K = 2: at most two at once
    communicator 1     [allreduce 1] │     [allreduce 3]       │
    main thread                      │ barrier                 │ barrier   before the third, before the fifth

Collectives of one communicator keep the order of the program; on different ones no order is needed, so a long one
holds nobody up but its own. The barrier bounds how far the ranks drift apart, and costs what it takes to come together.
"""

from unisono.step.operations import BARRIER
from unisono.step.overlaps.overlap import Overlap, in_order
from unisono.step.program import COMMUNICATION, MAIN, Task, order


def place(task: Task, before: int, outstanding: int) -> tuple[Task, ...]:
    """Carry a collective out on its communicator's thread; after `outstanding` of them wait for all under way."""
    placed = in_order(task, COMMUNICATION, before % outstanding)
    if not before or before % outstanding:
        return (placed,)
    barrier = in_order(Task(BARRIER, task.key, MAIN, group=task.group), MAIN, 0)
    others = tuple(order(number) for number in range(1, outstanding))
    return barrier._replace(writes=(*barrier.writes, *others)), placed


concurrent = Overlap(place, by_main=True, several=True)
