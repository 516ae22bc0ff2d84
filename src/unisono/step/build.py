"""Building blocks of the step programs of rules.

begin ─ forward 0 ─ forward 1 ─ ... ─ backward 0 ─ backward 1 ─ grad_input 1 ─ backward 2 ─ ... ─ end ─ wait
                                          │             │           └ weights of bucket 1 were read for the last time
                                          │             └ gradients of bucket 1: full
                                          └ the first gradient is there
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from unisono.step import operations as op
from unisono.step.layout import Layout, Updates
from unisono.step.overlaps import CollectiveTasks
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
from unisono.wires import EXACT

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

seen = partial(Value, "seen")
"""Version of a parameter that the forward pass has read."""


def forward(layout: Layout, rank: int = 0) -> list[Task]:
    """Return the tasks of a forward pass: each parameter is read when it is needed, and waited for if deferred; around
    its products are the exchanges of a split layer."""
    tasks = [Task(op.BEGIN, 0, MAIN, (ENDED,), (thread(MAIN),))]
    for parameter in layout.order:
        reading = Task(op.FORWARD, parameter, MAIN, (weights(parameter), BUFFERS), (seen(parameter), thread(MAIN)))
        tasks += activations(layout, rank, MAIN, (parameter,), backward=False, after=False)
        tasks += [reading, *activations(layout, rank, MAIN, (parameter,), backward=False, after=True)]
    return tasks


def activations(
    layout: Layout, rank: int, lane: str, parameters: Iterable[int], *, backward: bool, after: bool
) -> list[Task]:
    """Return the exchanges of split layers with these parameters before their products of a pass, or behind them."""
    return [
        Task(op.ACTIVATIONS, exchange, lane, (), (order(ACTIVATIONS), thread(lane)), RankGroup(ranks, ACTIVATIONS))
        for parameter in parameters
        for exchange in layout.exchanges.get((parameter, backward, after), ())
        for ranks in layout.activations[exchange].groups
        if rank in ranks
    ]


def backward(layout: Layout, lane: str, rank: int = 0) -> list[Task]:
    """Return the tasks of a backward pass: until the first gradient, until each bucket is full and its weights were
    read for the last time, and to its end. Around those of a bucket are the exchanges of its split layers."""
    lane_order = thread(lane)
    tasks = [Task(op.BACKWARD, 0, lane, tuple(map(seen, layout.order)), (BEGUN, lane_order))]
    for key in layout.filled:
        fresh, last = layout.ready[key], layout.last[key]
        tasks += activations(layout, rank, lane, fresh, backward=True, after=False)
        made = (*map(gradient, fresh), lane_order)
        tasks.append(Task(op.BACKWARD, key, lane, tuple(map(seen, fresh)), made, parameters=fresh))
        if last:  # behind all parts of a gradient, so that none of them waits
            read = (*map(seen, last), *map(weights, last))
            tasks.append(Task(op.GRAD_INPUT, key, lane, read, (lane_order,), parameters=last))
            tasks += activations(layout, rank, lane, last, backward=True, after=True)
    return [*tasks, Task(op.END, 0, lane, (), (ENDED, lane_order))]


AT_THE_END = -1
"""Key for tasks that run when the backward pass has ended."""

Followers = Iterable[tuple[int, Iterable[Task]]]
"""Tasks that follow buckets of a backward pass, each group with the key of its bucket, or AT_THE_END."""


def merge(backward_tasks: Iterable[Task], followers: Followers) -> Iterator[Task]:
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


def summed(
    layout: Layout, key: int, sends: CollectiveTasks, pack: Operation, total: Operation, wire: str | None
) -> list[Task]:
    """Return the tasks that pack a bucket and sum it over the ranks by `total`; with the wire "exact" as integers, on
    whose exponents the ranks agree before."""
    exact, held = wire == EXACT, (bucket(key),)
    gradients = tuple(map(gradient, layout.bucket(key).parameters))
    packed, agreed = Task(pack, key, UPDATE, (CONTROL,), (*held, *gradients)), list[Task]()
    if exact:
        measure, integers = op.EXACT[pack]
        agreed = [packed._replace(operation=measure), *sends.place(op.EXPONENTS, key, (), held)]
        packed = packed._replace(operation=integers)
    return [*agreed, packed, *sends.place(total, key, (), held, follows=exact)]


def updates(layout: Layout, key: int, sends: CollectiveTasks) -> list[Task]:
    """Return the optimizer's tasks once the gradients of bucket `key` are set, after clipping if there is any.

    Where parameters are split, `sends` places the sums of squares of all ranks: that by which they are clipped, and the
    step of an optimizer that needs norms of whole layers.
    """
    norms = layout.layer_norms and layout.split
    if layout.updates is Updates.OUTSIDE:
        return []
    if layout.updates is Updates.PARTS and layout.clip is None and not norms:
        parameters = layout.complete[key]
        buckets = dict.fromkeys(bucket(part) for parameter in parameters for part in layout.keys_of[parameter])
        return [_update(op.UPDATE, key, parameters, tuple(buckets))] if parameters else []
    if key < len(layout.buckets):
        return []
    all_buckets, tasks = tuple(map(bucket, layout.keys)), list[Task]()
    if layout.clip is not None and layout.split:
        tasks += sends.place(op.SUM_SQUARES, 0, all_buckets, (NORM,))
    if layout.clip is not None:
        tasks.append(Task(op.CLIP, key, UPDATE, (), (*all_buckets, NORM)))
    update = _update(op.UPDATE, key, range(layout.parameters), (*all_buckets, NORM))
    if norms:
        *barrier, placed = sends.place(op.UPDATE_WITH_NORMS, 0, update.reads, update.writes)
        return [*tasks, *barrier, placed._replace(parameters=update.parameters)]
    return [*tasks, update]


def own_updates(layout: Layout) -> Followers:
    """Yield the optimizer's tasks with this rank's own gradients, each with the key of the bucket that it follows."""
    everyone = range(layout.parameters)
    gradients = tuple(map(gradient, everyone))
    if layout.updates is Updates.OUTSIDE:
        step = _update(op.STEP_LOCAL, 0, everyone, (), gradients)
        yield AT_THE_END, [step._replace(lane=MAIN, writes=(*step.writes, thread(MAIN)))]
    elif layout.updates is Updates.WHOLE or layout.clip is not None:
        clip = [Task(op.CLIP_LOCAL, 0, UPDATE, (), gradients)] if layout.clip is not None else []
        yield AT_THE_END, [*clip, _update(op.UPDATE_LOCAL, 0, everyone, (), gradients)]
    else:
        for key in layout.filled:
            if parameters := layout.ready[key]:
                yield key, [_update(op.UPDATE_LOCAL, key, parameters, (), tuple(map(gradient, parameters)))]


def _update(
    operation: Operation, key: int, parameters: Sequence[int], reads: tuple[Value, ...], writes: tuple[Value, ...] = ()
) -> Task:
    """Return a step of the optimizer for these parameters, which writes their weights and states."""
    stepped = tuple(value for parameter in parameters for value in (weights(parameter), state(parameter)))
    return Task(operation, key, UPDATE, reads, (*writes, *stepped), parameters=tuple(parameters))


def buffers(sends: CollectiveTasks) -> list[Task]:
    """Return the tasks that send rank 0's buffers to all ranks, as they are when the main thread gets here."""
    pack = Task(op.PACK_BUFFERS, 0, MAIN, (), (BUFFERS, thread(MAIN)))
    return [pack, *sends.place(op.BROADCAST_BUFFERS, 0, (), (BUFFERS,))]


def wait(layout: Layout, own: bool = False) -> list[Task]:
    """Return the main thread's wait at the end of a step whose gradients are set, or stay its `own`, where its
    optimizer is called then; else its wait for the weights."""
    if layout.updates is not Updates.OUTSIDE:
        return wait_for_weights(layout)
    everyone = range(layout.parameters)
    if own:
        step = _update(op.WAIT_LOCAL, 0, everyone, (), tuple(map(gradient, everyone)))
    else:
        step = _update(op.WAIT, 0, everyone, (*map(bucket, layout.keys), BUFFERS))
    return [step._replace(lane=MAIN, writes=(*step.writes, thread(MAIN)))]


def wait_for_weights(layout: Layout) -> list[Task]:
    """Return the main thread's wait for all weights; empty where each parameter is waited for when it is read."""
    if layout.deferred and layout.updates is Updates.PARTS:
        return []
    return [Task(op.WAIT, 0, MAIN, tuple(map(weights, range(layout.parameters))), (thread(MAIN),))]
