"""Overlaps of communication and computing: each places the collectives of a step program (MXNET-MPI section 4).

Chain: all work is offloaded, and a dummy value keeps the collectives in order (dependency chaining, section 4.3). Each
task begins as soon as it can; the collectives run in the order of the program, the same on all ranks.

    lane main            backward 1   backward 2   backward 3
    lane update                   pack 1       pack 2 ...        set_grads 1  set_grads 2
    lane communication                  allreduce 1 ─order▶ allreduce 2 ─order▶ allreduce 3

Phases: as chain, but where some of several nodes have more ranks than one, a bucket's sum is three tasks, each in a
lane of its own (section 4.3): the sum within each node, for its first rank, the exchange between these ranks, and the
copies within each node. So the node phase of a bucket runs beside the network phase of another.

    lane node           sum 1   sum 2     sum 3                                     rank 0 of 2 nodes of 2 ranks
    lane communication        [allreduce 1] ─order▶ [allreduce 2] ─order▶ [allreduce 3]
    lane copies                             copy 1                copy 2              copy 3

Concurrent communicators: collectives use K of them in turn, one at a time on each (section 4.2). A long collective
delays only those behind it on its own; the barrier limits how far the ranks drift apart.

    communicator 0   [allreduce 0]   │          [allreduce 2]  │           K = 2: at most two at once
    communicator 1     [allreduce 1] │     [allreduce 3]       │
    main thread                      │ barrier                 │ barrier   before the third, before the fifth

Funnel: the main thread runs each collective when its bucket is ready (section 4.1). Any MPI library will do, as no
other thread calls it. But while the main thread waits for one bucket, others that are ready wait as well.

    lane computing   backward 1   backward 2   backward 3
    lane update               pack 1       pack 2 ...
    lane main                       [allreduce 1][allreduce 2][allreduce 3]     one at a time

None: the main thread runs all collectives once the backward pass has ended. Baseline of the others.

    lane main    ──backward──▶│ [allreduce 1][allreduce 2][allreduce 3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unisono.errors import UsageError
from unisono.step.layout import Layout
from unisono.step.operations import BARRIER, NODE_COPY, NODE_SUM
from unisono.step.program import COMMUNICATION, COPIES, MAIN, NODE, Operation, RankGroup, Task, Value, order, thread

PHASES = 3
"""Number of communicators of phases: 0 for the network and all else, 1 for sums and 2 for copies within nodes."""


class Overlap(NamedTuple):
    """Place of communication in the step (MXNET-MPI section 4 calls it embedding)."""

    lane: str
    """Lane of the collectives."""
    by_main: bool = False
    """True where the main thread runs collectives or barriers."""
    several: bool = False
    """True where several collectives may run at once, each on its own communicator."""
    after: bool = False
    """True where nothing is sent before the backward pass has ended."""
    phases: bool = False
    """True where the sum within a node, the exchange between nodes and the copies are tasks of their own."""

    @property
    def beside_main(self) -> bool:
        """True where a deferred backward pass has another thread: the main one runs collectives meanwhile."""
        return self.by_main and not self.after

    def communicators(self, outstanding: int) -> int:
        """Return the number of communicators for at most `outstanding` collectives at once: of phases, one for each."""
        return PHASES if self.phases else outstanding if self.several else 1


OVERLAPS: Mapping[str, Overlap] = {
    "funnel": Overlap(MAIN, by_main=True),
    "concurrent": Overlap(COMMUNICATION, by_main=True, several=True),
    "chain": Overlap(COMMUNICATION),
    "phases": Overlap(COMMUNICATION, phases=True),
    "none": Overlap(MAIN, by_main=True, after=True),
}


def find_overlap(name: str) -> Overlap:
    """Return the overlap of that name. Raises UsageError, listing the names, for an unknown one."""
    if name not in OVERLAPS:
        raise UsageError(f"there is no overlap {name!r}; there are {', '.join(OVERLAPS)}")
    return OVERLAPS[name]


class CollectiveTasks:
    """Collectives of all ranks, or of those that hold a bucket, placed one after another by an overlap."""

    def __init__(self, layout: Layout, overlap: Overlap, outstanding: int, rank: int | None = None) -> None:
        """Begin a step, with at most `outstanding` collectives at once where the overlap has several. Without the
        `rank`, those of which `place` is given no ranks are of all ranks."""
        self._layout, self._rank = layout, rank
        self._overlap, self._communicators = overlap, outstanding if overlap.several else 1
        self._before = 0

    def place(
        self,
        operation: Operation,
        key: int,
        reads: tuple[Value, ...],
        writes: tuple[Value, ...],
        ranks: Sequence[int] = (),
        follows: bool = False,
    ) -> tuple[Task, ...]:
        """Return the tasks of the next collective: of `ranks`, or by default of those that hold the bucket. One that
        `follows` the last, which it needs, is on the same communicator."""
        members = tuple(ranks) or self._layout.group_of(key, self._rank)
        task = Task(operation, key, self._overlap.lane, reads, writes, RankGroup(members))
        parted = self._overlap.phases and operation.parted and self._layout.phases
        if parted and len(members) == self._layout.ranks and self._rank is not None:
            return self._phases(task, self._rank)
        if follows:
            return (_in_order(task, (self._before - 1) % self._communicators),)
        communicator, begun = self._before % self._communicators, self._before > 0
        self._before += 1
        placed = _in_order(task, communicator)
        if not (self._overlap.several and begun and communicator == 0):
            return (placed,)
        barrier = Task(BARRIER, key, MAIN, group=task.group)
        return _in_order(barrier, *range(self._communicators)), placed

    def _phases(self, task: Task, rank: int) -> tuple[Task, ...]:
        """Return the phases of a sum that a rank takes part in."""
        nodes, (firsts, _) = self._layout.phases
        node = next(ranks for ranks in nodes if rank in ranks)
        phases = (NODE_SUM, NODE, node, 1), (task.operation, task.lane, firsts, 0), (NODE_COPY, COPIES, node, 2)
        return tuple(
            _in_order(task._replace(operation=operation, lane=lane, group=RankGroup(ranks)), communicator)
            for operation, lane, ranks, communicator in phases
            if rank in ranks and len(ranks) > 1
        )


def _in_order(task: Task, communicator: int, *further: int) -> Task:
    """Return a collective on `communicator`, after all before it there, and on the `further` ones."""
    assert task.group is not None, "a collective has a group"
    main_thread = (thread(MAIN),) if task.lane == MAIN else ()
    orders = (order(communicator), *main_thread, *map(order, further))
    return task._replace(writes=(*task.writes, *orders), group=RankGroup(task.group.ranks, communicator))
