"""A training step as data: tasks that read and write values. The same tasks are verified, priced, drawn and played.

    lane main            forward 0 ─ forward 1 ─ backward 1 ── backward 2
    lane update                                     pack 1 ┐      pack 2 ┐        settle 1, update 1 ...
    lane communication                                     └ allreduce 1 └ allreduce 2

The rules that every reader (`verify`, `predict`, `draw`, `play`, `play_in_process`) follows:

1. Tasks that touch the same value, one of them writing it, keep program order. Nothing else is ordered: an order that
   is wanted is a value, like the dummy variable of dependency chaining (MXNET-MPI section 4.3).
2. A lane is a pool of threads that runs whatever is ready.
3. The n-th task of a group on one member meets the n-th task of that group on each other member. Of a `send` and a
   `receive` in one group, the n-th send to a rank meets that rank's n-th receive.
4. A task without an action belongs to the program outside: forward, backward and wait. It begins when what it reads is
   free (its gate), and its end is signalled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unisono.step.costs import Costs, Duration
    from unisono.step.symbols import Symbols

MAIN = "main"
"""The lane of the thread that runs the program outside: the user's loop."""

COMPUTING = "computing"
"""The lane of a backward pass that runs beside the main thread."""

COMMUNICATION = "communication"
UPDATE = "update"


class Value(NamedTuple):
    """What tasks read and write: ("weights", 3) of parameter 3, ("bucket", 2): what travels in bucket 2."""

    kind: str
    key: int


class Group(NamedTuple):
    """The ranks of a collective, and which of their communicators it uses."""

    ranks: tuple[int, ...]
    number: int = 0


class Role(Enum):
    """The part of a task in what its group does."""

    ALONE = "alone"
    """A rank does it by itself."""
    COLLECTIVE = "collective"
    """All members do it together."""
    SEND = "send"
    """To `Task.peer`."""
    RECEIVE = "receive"
    """From `Task.peer`; from whichever member of the group sends first where that is None (`receive_any`)."""


Act = Callable[[Any, "Task", Any], None]
"""(replica, task, world) -> None. A replica is a rank's model, gradients and buckets (`replica.py`); the world's calls
meet those of the task's group, and of no other."""

Mean = Callable[[Sequence["Symbols"], "Task"], None]
"""(the symbols of each rank that takes part, task) -> None."""

Price = Callable[["Task", "Costs"], "Duration"]


@dataclass(frozen=True, eq=False)
class Operation:
    """Work of one kind: what it does to tensors, what it means for symbols, and what it costs."""

    name: str
    act: Act | None
    """None: the program outside carries it out."""
    mean: Mean
    price: Price
    role: Role = Role.ALONE
    letter: str = ""
    """How it is drawn; the first letter of its name where nothing is said."""

    def __repr__(self) -> str:
        return self.name


class Task(NamedTuple):
    """An operation on certain values."""

    operation: Operation
    key: int
    """The bucket that it is about, from 1 on, or the parameter, from 0 on (forward)."""
    lane: str
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    group: Group | None = None
    parameters: tuple[int, ...] = ()
    """Those that the operation is about, where the bucket does not say it (update)."""
    peer: int | None = None
    """The other rank of a send or a receive."""

    def __str__(self) -> str:
        return f"{self.operation.name} {self.key}"


StepProgram = tuple[Task, ...]
"""One rank's tasks, in program order."""


class Step(NamedTuple):
    """An event: the program outside trains on its next batch."""

    number: int
    synchronize: bool = True
    """False: the gradients are added to those of the next step, of this rank alone (accumulation)."""


def weights(parameter: int) -> Value:
    """Weights of a parameter."""
    return Value("weights", parameter)


def gradient(parameter: int) -> Value:
    """Gradient of a parameter, of this rank alone."""
    return Value("gradient", parameter)


def state(parameter: int) -> Value:
    """State that the optimizer keeps for a parameter."""
    return Value("state", parameter)


def bucket(key: int) -> Value:
    """Memory of what travels in a bucket."""
    return Value("bucket", key)


def order(number: int) -> Value:
    """Dummy value that keeps the tasks of one communicator in order."""
    return Value("order", number)


def thread(lane: str) -> Value:
    """Dummy value that keeps the tasks of a lane's only thread in program order."""
    return Value(f"thread {lane}", 0)


def dependencies(program: Iterable[Task]) -> list[list[int]]:
    """Return, for each task, the tasks it waits for by rule 1: the last writer of what it touches, and for what it
    writes also all readers since.

    Linear in the number of touched values. A dependency that follows from others may be left out.
    """
    writer: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    found: list[list[int]] = []
    for number, task in enumerate(program):
        before = {writer[value] for value in (*task.reads, *task.writes) if value in writer}
        for value in task.writes:
            before.update(readers.pop(value, ()))
            writer[value] = number
        for value in task.reads:
            if value not in task.writes:
                readers.setdefault(value, []).append(number)
        before.discard(number)
        found.append(sorted(before))
    return found


class Graph(NamedTuple):
    """One rank's tasks with what they wait for, both ways."""

    tasks: StepProgram
    before: list[int]
    """For each task, how many it waits for."""
    after: list[list[int]]
    """For each task, those that wait for it."""


def graph_of(program: StepProgram) -> Graph:
    """Return a program with its dependencies."""
    waits = dependencies(program)
    after: list[list[int]] = [[] for _ in program]
    for number, before in enumerate(waits):
        for one in before:
            after[one].append(number)
    return Graph(program, list(map(len, waits)), after)
