"""Funnel: the main thread runs each collective when its bucket is ready (MXNET-MPI section 4.1).

    lane computing   backward 1   backward 2   backward 3
    lane update               pack 1       pack 2 ...
    lane main                       [allreduce 1][allreduce 2][allreduce 3]     one at a time

The order of the main thread is the order of the collectives, the same on all ranks. Any MPI library will do, as no
other thread calls it. But while the main thread waits for one bucket, others that are ready wait as well.
"""

from unisono.step.overlaps.overlap import Overlap, in_order
from unisono.step.program import MAIN, Task


def place(task: Task, _: int, __: int) -> tuple[Task, ...]:
    """Return the task that runs a collective on the main thread."""
    return (in_order(task, MAIN, 0),)


funnel = Overlap(place, by_main=True)
