"""Carries step programs out on the engine: a value is a variable there, a lane is a pool of threads.

    program    forward 0 │ backward 1 │ pack 1, allreduce 1, settle 1, update 1 │ backward 2 │ pack 2 ...
                         ▲ the program outside has come so far                                 ▲ and goes on to here
                           what follows was pushed when backward 1 had ended

The program outside is one thread's, so its tasks end in program order: what follows one of them is pushed when it has
ended, and the gate of the next is a wait for what it reads. Tasks on lane `main` are carried out by whoever goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from typing import NamedTuple

import torch

from unisono.engine.dependencies import Variable
from unisono.engine.engine import Engine, Handle, Observe
from unisono.engine.exchanges import Exchanges, call_labelled
from unisono.errors import OperationError, UsageError
from unisono.step.program import MAIN, UPDATE, Act, StepProgram, Task, Value
from unisono.step.replica import Replica
from unisono.world import World

OF_ONE_PASS = frozenset(("seen", "begun", "ended", "thread main", "thread computing"))
"""Kinds of values without a variable: a pass has its own, or one thread keeps their order."""

OF_UPDATES = frozenset(("gradient", "state"))
"""Kinds of values without a variable where only tasks of lane `update`, which has one thread, touch them."""


class PreparedTask(NamedTuple):
    """A task with what carries it out."""

    task: Task
    act: Act
    read: tuple[Variable, ...]
    write: tuple[Variable, ...]
    world: World
    label: str
    """What ranks compare of a collective; empty for what a rank does alone."""


Prepared = tuple[PreparedTask, ...]


class Player:
    """Carries out step programs of one user of `exchanges`. All ranks make one together."""

    def __init__(
        self, exchanges: Exchanges, communicators: int, user: str = "", observe: Observe | None = None
    ) -> None:
        """`user` is the name by which ranks tell the collectives of one user from those of others."""
        self._worlds = exchanges.worlds(communicators)
        self._exchanges, self._user, self._observe = exchanges, user, observe
        self._variables: dict[Value, Variable] = {}
        self._writers: dict[Value, Handle] = {}  # the last task that was pushed and writes a parameter's weights
        self._under_way = deque[Handle]()

    @property
    def engine(self) -> Engine:
        """The engine, for operations of others that need what the tasks bring."""
        return self._exchanges.engine

    def variable(self, value: Value) -> Variable:
        """Return the engine's variable that stands for a value."""
        variable = self._variables.get(value)
        if variable is None:
            if value.kind == "order":
                variable = self._exchanges.turn(value.key)
            else:
                variable = Variable(f"{value.kind} {value.key}")
            self._variables[value] = variable
        return variable

    def prepare(self, program: StepProgram) -> Prepared:
        """Return a program whose tasks know their variables and communicators: it can be played any number of times."""
        inside = [task for task in program if task.operation.act is not None and task.lane != UPDATE]
        touched = {value for task in inside for value in (*task.reads, *task.writes) if value.kind in OF_UPDATES}
        return tuple(self._prepare(task, touched) for task in program)

    def play(self, ready: PreparedTask, replica: Replica) -> None:
        """Carry a task out as soon as it may be; on lane `main`, in this thread."""
        task, act, read, write, world, label = ready
        name = str(task)

        def action() -> None:
            with torch.no_grad():
                if label:
                    call_labelled(world, label, lambda one: act(replica, task, one))
                else:
                    act(replica, task, world)

        if task.lane == MAIN:
            self.engine.carry_out(action, read, write, name, self._observe, task)
            return
        handle = self.engine.push(action, read, write, task.lane, name, observe=self._observe, about=task)
        self._under_way.append(handle)
        for value in task.writes:
            if value.kind == "weights":
                self._writers[value] = handle

    def wait_for(self, value: Value) -> bool:
        """Wait until the weights that a value names are up to date; whether anybody was waited for."""
        handle = self._writers.pop(value, None)
        if handle is not None:
            handle.wait()
        return handle is not None

    def wait(self, *values: Value) -> None:
        """Wait until all that writes these values, or all that was pushed if there are none, is over.

        Raises OperationError where it has failed; it raises it again whenever all is waited for.
        """
        if values:
            self.engine.wait(*map(self.variable, values))
            return
        failed: tuple[Handle, OperationError] | None = None
        while self._under_way:
            handle = self._under_way.popleft()
            try:
                handle.wait()
            except OperationError as error:
                failed = failed or (handle, error)
        self._writers.clear()
        if failed is not None:
            self._under_way.append(failed[0])
            raise failed[1]

    def _prepare(self, task: Task, touched: Set[Value]) -> PreparedTask:
        read, write = (
            tuple(
                self.variable(value)
                for value in values
                if value.kind not in OF_ONE_PASS and (value.kind not in OF_UPDATES or value in touched)
            )
            for values in (task.reads, task.writes)
        )
        label = f" [{task} of {self._user}]" if task.group is not None else ""
        return PreparedTask(task, task.operation.act or _outside, read, write, self._world_of(task), label)

    def _world_of(self, task: Task) -> World:
        """Return the world whose calls meet those of the task's group. Raises UsageError where there is none."""
        group, worlds = task.group, self._worlds
        if group is None:
            return worlds[0]
        if group.ranks != tuple(range(worlds[0].size)):
            raise UsageError(
                f"{task} is of the ranks {group.ranks}: over MPI a group has all {worlds[0].size} ranks so far"
            )
        if group.number >= len(worlds):
            raise UsageError(
                f"{task} uses communicator {group.number} of {len(worlds)}: the rule says how many there are "
                "(BaseRule.communicators)"
            )
        return worlds[group.number]


class Cursor:
    """How far the program outside has come in a step program."""

    def __init__(self, program: Prepared, player: Player, replica: Replica) -> None:
        self._program, self._player, self._replica = program, player, replica
        self._next = 0

    @property
    def outside(self) -> Task | None:
        """The task of the program outside that has to end next; None where the program has no more."""
        return self._program[self._next].task if self._next < len(self._program) else None

    def end(self, pushed: Callable[[Task], object]) -> None:
        """Say that the next task outside has ended: what follows it is carried out, `pushed` called before each."""
        self._next += 1
        while self._next < len(self._program):
            ready = self._program[self._next]
            if ready.task.operation.act is None:
                return
            pushed(ready.task)
            self._next += 1
            self._player.play(ready, self._replica)


def _outside(_: Replica, task: Task, __: World) -> None:
    raise UsageError(f"{task} is carried out by the program outside")
