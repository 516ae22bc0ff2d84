"""Building blocks of the step programs of rules.

begin ─ forward 0 ─ forward 1 ─ ... ─ backward 0 ─ backward 1 ─ grad_input 1 ─ backward 2 ─ ... ─ end ─ wait
                                          │             │           └ weights of bucket 1 were read for the last time
                                          │             └ gradients of bucket 1: full
                                          └ the first gradient is there
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from unisono.step import operations as op
from unisono.step.layout import Layout, Updates
from unisono.step.overlaps import Overlap
from unisono.step.program import (
    MAIN,
    UPDATE,
    Operation,
    RankGroup,
    Task,
    Value,
    bucket,
    gradient,
    order,
    state,
    thread,
    weights,
)

CONTROL = Value("control", 0)
"""Control message, which gives the weight of this rank's gradients."""

BEGUN = Value("begun", 0)
"""Value that is written when the first gradient is ready."""

ENDED = Value("ended", 0)
"""Value that is written when the backward pass has ended."""

NORM = Value("norm", 0)
"""Common norm of the averaged gradients."""

BUFFERS = Value("buffers", 0)
"""Memory that the model's buffers are sent in."""


ACTIVATIONS = -1
"""Number of the communicators of split layers, beside those of gradients."""


def seen(parameter: int) -> Value:
    """Return the value that stands for the version of a parameter that the forward pass has read."""
    return Value("seen", parameter)


def forward(layout: Layout, rank: int = 0) -> list[Task]:
    """Return the tasks of a forward pass: each parameter is read when it is needed, and waited for if deferred; around
    its products are the exchanges of a split layer."""
    tasks = [Task(op.BEGIN, 0, MAIN, (ENDED,), (thread(MAIN),))]
    for number in layout.order:
        reading = Task(op.FORWARD, number, MAIN, (weights(number), BUFFERS), (seen(number), thread(MAIN)))
        tasks += activations(layout, rank, MAIN, (number,), backward=False, after=False)
        tasks += [reading, *activations(layout, rank, MAIN, (number,), backward=False, after=True)]
    return tasks


def activations(
    layout: Layout, rank: int, lane: str, parameters: Iterable[int], *, backward: bool, after: bool
) -> list[Task]:
    """Return the exchanges of split layers with these parameters before their products of a pass, or behind them."""
    numbers = (one for number in parameters for one in layout.exchanges.get((number, backward, after), ()))
    return [
        Task(op.ACTIVATIONS, number, lane, (), (order(ACTIVATIONS), thread(lane)), RankGroup(ranks, ACTIVATIONS))
        for number in numbers
        for ranks in layout.activations[number].groups
        if rank in ranks
    ]


def backward(layout: Layout, lane: str, rank: int = 0) -> list[Task]:
    """Return the tasks of a backward pass: until the first gradient, until each bucket is full and its weights were
    read for the last time, and to its end. Around those of a bucket are the exchanges of its split layers."""
    own = thread(lane)
    tasks = [Task(op.BACKWARD, 0, lane, tuple(map(seen, layout.order)), (BEGUN, own))]
    for key in layout.filled:
        fresh, last = layout.ready[key], layout.last[key]
        tasks += activations(layout, rank, lane, fresh, backward=True, after=False)
        made = (*map(gradient, fresh), own)
        tasks.append(Task(op.BACKWARD, key, lane, tuple(map(seen, fresh)), made, parameters=fresh))
        if last:  # behind all parts of a gradient, so that none of them waits
            read = (*map(seen, last), *map(weights, last))
            tasks.append(Task(op.GRAD_INPUT, key, lane, read, (own,), parameters=last))
            tasks += activations(layout, rank, lane, last, backward=True, after=True)
    return [*tasks, Task(op.END, 0, lane, (), (ENDED, own))]


AT_THE_END = -1
"""Key for tasks that run when the backward pass has ended."""


def merge(backward_tasks: Iterable[Task], followers: Iterable[tuple[int, Iterable[Task]]]) -> Iterator[Task]:
    """Yield the tasks of a backward pass and those that follow; each (key, tasks) is placed once its bucket is full,
    and a task that writes weights once the backward pass has read them for the last time."""
    left, full = deque(backward_tasks), set[int]()
    unread = {value for task in left if task.operation is op.GRAD_INPUT for value in task.reads}

    def end_next() -> Task:
        task = left.popleft()
        if task.operation is op.GRAD_INPUT:
            unread.difference_update(task.reads)
        elif task.operation is not op.ACTIVATIONS:
            full.add(AT_THE_END if task.operation is op.END else task.key)
        return task

    for key, tasks in followers:
        while key not in full:
            yield end_next()
        for task in tasks:
            while not unread.isdisjoint(task.writes):
                yield end_next()
            yield task
    yield from left


class CollectiveTasks:
    """Collectives of all ranks, or of those that hold a bucket, placed one after another by an overlap."""

    def __init__(self, layout: Layout, overlap: Overlap, outstanding: int, rank: int = 0) -> None:
        self._layout, self._rank = layout, rank
        self._overlap, self._outstanding = overlap, outstanding
        self._before = 0

    def place(
        self, operation: Operation, key: int, reads: tuple[Value, ...], writes: tuple[Value, ...]
    ) -> tuple[Task, ...]:
        """Return the tasks of the next collective."""
        group = RankGroup(self._layout.group_of(key, self._rank))
        task = Task(operation, key, MAIN, reads, writes, group)
        self._before += 1
        return self._overlap.place(task, self._before - 1, self._outstanding)


def updates(layout: Layout, key: int, sends: CollectiveTasks | None = None) -> list[Task]:
    """Return the optimizer's tasks once the gradients of bucket `key` are set, after clipping if there is any.

    Where parameters are split, `sends` places the sum of squares of all ranks, by which they are clipped.
    """
    if layout.updates is Updates.OUTSIDE:
        return []
    if layout.clip is not None or layout.updates is Updates.WHOLE:
        if key < len(layout.buckets):
            return []
        every = tuple(map(bucket, layout.keys))
        clip = [Task(op.CLIP, key, UPDATE, (), (*every, NORM))] if layout.clip is not None else []
        if clip and layout.split and sends is not None:
            clip = [*sends.place(op.SUM_SQUARES, 0, every, (NORM,)), *clip]
        return [*clip, update(layout, key, tuple(range(layout.parameters)))]
    return [update(layout, key, layout.complete[key])] if layout.complete[key] else []


def update(layout: Layout, key: int, parameters: tuple[int, ...]) -> Task:
    """Return the optimizer's task for these parameters, with averaged gradients."""
    buckets = dict.fromkeys(bucket(one) for number in parameters for one in layout.keys_of[number])
    norm = (NORM,) if layout.clip is not None else ()
    return Task(op.UPDATE, key, UPDATE, (*buckets, *norm), stepped(parameters), parameters=parameters)


def stepped(parameters: Iterable[int]) -> tuple[Value, ...]:
    """Return the values that the optimizer's step writes."""
    return tuple(value for number in parameters for value in (weights(number), state(number)))


def buffers(sends: CollectiveTasks) -> list[Task]:
    """Return the tasks that send rank 0's buffers to all ranks, as they are when the main thread gets here."""
    pack = Task(op.PACK_BUFFERS, 0, MAIN, (), (BUFFERS, thread(MAIN)))
    return [pack, *sends.place(op.BROADCAST_BUFFERS, 0, (), (BUFFERS,))]


def wait_for_weights(layout: Layout) -> list[Task]:
    """Return the main thread's wait for all weights."""
    return [Task(op.WAIT, 0, MAIN, tuple(map(weights, range(layout.parameters))), (thread(MAIN),))]


def wait(layout: Layout) -> list[Task]:
    """Return the main thread's wait at the end of a step; empty where each parameter is waited for when it is read."""
    everyone = tuple(range(layout.parameters))
    if layout.updates is Updates.OUTSIDE:
        read = (*map(bucket, layout.keys), BUFFERS)
        return [Task(op.WAIT, 0, MAIN, read, (*stepped(everyone), thread(MAIN)), parameters=everyone)]
    one_by_one = layout.deferred and layout.updates is Updates.PARTS
    return [] if one_by_one else wait_for_weights(layout)


def own_updates(layout: Layout) -> list[tuple[int, list[Task]]]:
    """Return the optimizer's tasks with this rank's own gradients, each with the key of the bucket that it follows."""
    everyone = tuple(range(layout.parameters))
    own = tuple(map(gradient, everyone))
    if layout.updates is Updates.OUTSIDE:
        write = (*own, *stepped(everyone), thread(MAIN))
        return [(AT_THE_END, [Task(op.STEP_LOCAL, 0, MAIN, (), write, parameters=everyone)])]
    if layout.updates is Updates.WHOLE or layout.clip is not None:
        clip = [Task(op.CLIP_LOCAL, 0, UPDATE, (), own)] if layout.clip is not None else []
        return [(AT_THE_END, [*clip, own_update(0, everyone)])]
    return [(key, [own_update(key, layout.ready[key])]) for key in layout.filled if layout.ready[key]]


def own_update(key: int, parameters: tuple[int, ...]) -> Task:
    """Return the optimizer's task for these parameters, with this rank's own gradients."""
    own = tuple(map(gradient, parameters))
    return Task(op.UPDATE_LOCAL, key, UPDATE, (), (*own, *stepped(parameters)), parameters=parameters)


def wait_for_own(layout: Layout) -> list[Task]:
    """Return the main thread's wait after own updates: for all weights, unless each is waited for when it is read."""
    return wait_for_weights(layout) if layout.updates is Updates.OUTSIDE else wait(layout)
