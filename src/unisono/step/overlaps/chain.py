"""Dependency chaining: all work is offloaded, and a dummy value keeps the collectives in order (MXNET-MPI section 4.3).

    lane main            backward 1   backward 2   backward 3
    lane update                   pack 1       pack 2 ...        set_grads 1  set_grads 2
    lane communication                  allreduce 1 ─order▶ allreduce 2 ─order▶ allreduce 3

The main thread waits for nothing. Packing, the collective and setting the gradients are separate tasks, so each
begins as soon as it can. The collectives run in the order of the program, the same on all ranks, whichever is ready
first.
"""

from unisono.step.overlaps.overlap import Overlap, in_order
from unisono.step.program import COMMUNICATION, Task


def place(task: Task, _: int, __: int) -> tuple[Task, ...]:
    """Return the task that runs a collective on the communication thread, after those before it."""
    return (in_order(task, COMMUNICATION, 0),)


chain = Overlap(place)
