"""Player of schedules: products on the calling thread, exchanges on one thread of the group, in the schedule's order.

    calling thread    x0 W │ x1 W │ wait for sum 1
    group's thread         │ sum 0 │ sum 1 │            each begins once its product is over and the last sum is

A group has one thread of exchanges, and a pass ends when all of its own are over. So calls on the group never overlap,
and its communicator serves both threads. Gradients are exchanged by other threads, on other communicators.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine, Handle
from unisono.errors import OperationError
from unisono.tensor_parallel.overlap.schedule import PassSchedule, SliceTask, TaskKind
from unisono.world import World

ACTIVATIONS = "activations"
"""Kind of the exchanges, by which their thread is named."""

Actions = Mapping[TaskKind, Callable[[int], object]]
"""Functions that carry out a task, by its kind, for the number of a slice."""


def exchange_engine(_: World) -> Engine:
    """Return an engine with one thread for the exchanges of a group: a resource of its world."""
    return Engine({ACTIVATIONS: 1})


def play(schedule: PassSchedule, actions: Actions, engine: Engine) -> float:
    """Carry a schedule out; return the seconds that the calling thread waited for exchanges. All of it is over then,
    also where it fails.

    Raises what a product raises, and OperationError where an exchange has failed; later exchanges are left out then.
    """
    order = Variable("exchanges of a pass")  # an exchange that fails spoils it for those that follow
    left, over, begun = deque(schedule.exchanges), set[SliceTask](), dict[SliceTask, Handle]()
    waited = 0.0

    def begin_exchanges() -> None:
        while left and over.issuperset(schedule.needs.get(left[0], ())):
            task = left.popleft()
            action = partial(actions[task.kind], task.number)
            name = f"{task.kind.value} of slice {task.number}"
            begun[task] = engine.push(action, (), (order,), ACTIVATIONS, name)

    try:
        for task in schedule.products:
            begin_exchanges()
            began = time.perf_counter()
            for need in schedule.needs.get(task, ()):
                begun[need].wait()
            waited += time.perf_counter() - began
            actions[task.kind](task.number)
            over.add(task)
        begin_exchanges()
        began = time.perf_counter()
        for handle in begun.values():
            handle.wait()
        waited += time.perf_counter() - began
    except Exception:  # an interrupt is no Exception: it ends the program without waiting for other ranks
        for handle in begun.values():
            with suppress(OperationError):
                handle.wait()
        raise
    return waited
