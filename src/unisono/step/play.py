"""Execution of step programs on the engine: a value is a variable there, a lane is a pool of threads.

    program    forward 0 │ backward 1 │ pack 1, allreduce 1, set_grads 1, update 1 │ backward 2 │ pack 2 ...
                         ▲ the outside program is here; the next tasks are pushed            ▲ and it continues to here
                           when backward 1 has ended

The outside program (`reducer/backward_pass.py`) plays the tasks that follow each of its own. Tasks on lane `main` run
in the thread that plays them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch

from unisono.engine import Engine, Handle, Observe, Variable
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.errors import OperationError, UsageError
from unisono.placement import Partition
from unisono.step.program import MAIN, UPDATE, Act, RankGroup, StepProgram, Task, Value
from unisono.step.replica import Replica
from unisono.world import World

OF_ONE_PASS = frozenset(("seen", "begun", "ended", "thread main", "thread computing"))
"""Kinds of values without a variable: each pass has its own, or one thread keeps their order."""

OF_UPDATES = frozenset(("gradient", "state"))
"""Kinds of values without a variable where only tasks of lane `update`, which has one thread, touch them."""

OVER_STEPS = "change"
"""Kind of values whose collective may last beyond its step: no step waits for it, but tasks that need it do."""

LinkOf = Callable[[RankGroup], Any]
"""Function that returns the link between this rank and the other seat of a pair."""


class PreparedTask(NamedTuple):
    """Task with everything that is needed to run it."""

    task: Task
    act: Act
    read: tuple[Variable, ...]
    write: tuple[Variable, ...]
    world: Any
    """World, or link of a pair, that the task's group uses."""
    label: str
    """Label that ranks compare in a collective; empty for a task of one rank alone."""


Prepared = tuple[PreparedTask, ...]


class Player:
    """Runner of the step programs of one user of `exchanges`. All ranks construct it together."""

    def __init__(
        self,
        pool: CommunicatorPool,
        communicators: int,
        user: str = "",
        observe: Observe | None = None,
        link: LinkOf | None = None,
        partitions: Sequence[Partition] = (),
    ) -> None:
        """Take `communicators` communicators. `user` distinguishes the collectives of one user from others; `link`
        returns the link to a server; `partitions` are groups of ranks that have collectives of their own, each with as
        many communicators."""
        self._worlds, self._link = pool.worlds(communicators), link
        self._of_groups = dict(pool.part_worlds(partition, communicators) for partition in partitions)
        self._pool, self._user, self._observe = pool, user, observe
        self._variables: dict[Value, Variable] = {}
        self._writers: dict[Value, Handle] = {}  # the last task that was pushed and writes a parameter's weights
        self._under_way = deque[Handle]()
        self._over_steps: dict[Value, Handle] = {}  # the last collective that writes each of these values

    @property
    def engine(self) -> Engine:
        """Engine of the exchanges, for other operations that depend on the results of tasks."""
        return self._pool.engine

    def variable(self, value: Value) -> Variable:
        if value not in self._variables:
            name = f"{value.kind} {value.key}"
            self._variables[value] = self._pool.exclusive(value.key) if value.kind == "order" else Variable(name)
        return self._variables[value]

    def prepare(self, program: StepProgram) -> Prepared:
        """Return a program whose tasks have their variables and communicators. It can be played any number of times."""
        inside = [task for task in program if task.operation.act is not None and task.lane != UPDATE]
        touched = {value for task in inside for value in (*task.reads, *task.writes) if value.kind in OF_UPDATES}
        return tuple(self._prepare(task, touched) for task in program)

    def play(self, ready: PreparedTask, replica: Replica) -> None:
        """Run a task as soon as its values allow; on lane `main`, in this thread."""
        task, act, read, write, world, label = ready
        name = str(task)

        def action() -> None:
            with torch.no_grad(), world.labelled(label) if label else nullcontext():
                act(replica, task, world)

        if task.lane == MAIN:
            self.engine.carry_out(action, read, write, name, self._observe, task)
            return
        handle = self.engine.push(action, read, write, task.lane, name, observe=self._observe, about=task)
        lasting = [value for value in task.writes if value.kind == OVER_STEPS] if label else []
        if lasting:
            self._over_steps[lasting[0]] = handle
            return
        self._under_way.append(handle)
        for value in task.writes:
            if value.kind == "weights":
                self._writers[value] = handle

    def wait_for(self, value: Value) -> bool:
        """Wait until the weights that a value names are up to date. Return True where they were not."""
        if (handle := self._writers.get(value)) is None:
            return False
        try:
            return not handle.wait(0) and handle.wait()
        finally:  # not before it is over: another thread that reads the weights waits, too
            if handle.over.is_set() and self._writers.get(value) is handle:
                self._writers.pop(value, None)

    def wait(self, *values: Value) -> None:
        """Wait for all tasks that write these values; without values, for all that were pushed, except collectives that
        may last beyond their step.

        Raises OperationError where one has failed. Each wait for all raises it again.
        """
        if values:
            self.engine.wait(*map(self.variable, values))
            while self._under_way and self._under_way[0].succeeded:  # else they would hold their tensors
                self._under_way.popleft()
            return
        failed: tuple[Handle, OperationError] | None = None
        under_way, written = tuple(self._under_way), tuple(self._writers.items())
        for handle in under_way:  # they stay until they have ended: another thread may wait for them, too
            try:
                handle.wait()
            except OperationError as error:
                failed = failed or (handle, error)
        for handle in under_way:
            if failed is None or handle is not failed[0]:
                with suppress(ValueError):  # that thread has removed it
                    self._under_way.remove(handle)
        for value, handle in written:
            if self._writers.get(value) is handle:
                self._writers.pop(value, None)
        if failed is not None:
            raise failed[1]

    def wait_over_steps(self) -> None:
        """Wait for the collectives that may last beyond their step. Raises OperationError where one has failed."""
        while self._over_steps:
            _, handle = self._over_steps.popitem()
            handle.wait()

    def _prepare(self, task: Task, touched: Set[Value]) -> PreparedTask:
        read, write = (
            tuple(
                self.variable(value)
                for value in values
                if value.kind not in OF_ONE_PASS and (value.kind not in OF_UPDATES or value in touched)
            )
            for values in (task.reads, task.writes)
        )
        label = f" [{task} of {self._user}]" if task.group is not None and self._link is None else ""
        return PreparedTask(task, task.operation.act or _outside, read, write, self._world_of(task), label)

    def _world_of(self, task: Task) -> Any:
        """Return the world, or the link, whose calls match those of the task's group. Raises UsageError where there is
        none."""
        group, worlds = task.group, self._worlds
        if group is None:
            return worlds[0]
        if self._link is not None:
            return self._link(group)
        if group.ranks != tuple(range(worlds[0].size)):
            if group.ranks not in self._of_groups:
                raise UsageError(
                    f"{task} is of the ranks {group.ranks}: over MPI a group has all {worlds[0].size} ranks, those "
                    "that hold the same part of a split layer, or those of one of the rule's partitions "
                    "(BaseRule.partitions)"
                )
            worlds = self._of_groups[group.ranks]
        if group.number >= len(worlds):
            raise UsageError(
                f"{task} uses communicator {group.number} of {len(worlds)}: the rule defines how many there are "
                "(BaseRule.communicators)"
            )
        return worlds[group.number]


def _outside(_: Replica, task: Task, __: World) -> None:
    raise UsageError(f"{task} is carried out by the program outside")
