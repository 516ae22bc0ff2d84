"""Training step as data: tasks that read and write values. The same tasks are verified, priced, drawn and played.

    lane main            forward 0 ─ forward 1 ─ backward 1 ── backward 2
    lane update                                     pack 1 ┐      pack 2 ┐        set_grads 1, update 1 ...
    lane communication                                     └ allreduce 1 └ allreduce 2

Rules that every reader (`verify`, `predict`, `draw`, `play`, `play_in_process`) follows:

1. Tasks that touch the same value, one of them writing it, keep program order. Nothing else is ordered: a wanted order
   is a value, like the dummy variable of dependency chaining (MXNET-MPI section 4.3).
2. A lane is a pool of threads that runs whatever is ready.
3. The n-th task of a group on one member matches the n-th task of that group on each other member. For a `send` and a
   `receive` in one group, the n-th send to a rank matches that rank's n-th receive.
4. A task without an action belongs to the outside program: forward, backward and wait. It begins when the values that
   it reads are free (its gate), and its end is signalled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.step.costs import Costs, Duration, free

if TYPE_CHECKING:
    from unisono.step.symbolic_state import SymbolicState

MAIN = "main"
"""Lane of the thread that runs the outside program: the user's loop."""

COMPUTING = "computing"
"""Lane of a backward pass that runs beside the main thread."""

COMMUNICATION = "communication"
UPDATE = "update"

NODE = "node"
"""Lane of sums within nodes, where they are tasks of their own."""

COPIES = "copies"
"""Lane of the copies within nodes that follow them."""

LANES = MAIN, COMPUTING, NODE, COMMUNICATION, COPIES, UPDATE
"""All lanes."""


class Value(NamedTuple):
    """Value that tasks read and write: ("weights", 3) for parameter 3, ("bucket", 2) for the memory of bucket 2."""

    kind: str
    key: int


class RankGroup(NamedTuple):
    """Ranks of a collective, and the number of the one of their communicators that it uses."""

    ranks: tuple[int, ...]
    number: int = 0


class Role(Enum):
    """Part of a task in the work of its group."""

    LOCAL = "local"
    """Work of a rank by itself."""
    COLLECTIVE = "collective"
    """Work of all members together."""
    SEND = "send"
    """Message to `Task.peer`."""
    RECEIVE = "receive"
    """Message from `Task.peer`; where that is None, from whichever member of the group sends first (`receive_any`)."""


Act = Callable[[Any, "Task", Any], None]
"""Function (replica, task, world) -> None. A replica is a rank's model, gradients and buckets (`replica.py`). The
world's calls match those of the task's group, and of no other."""

SymbolicEffect = Callable[[Sequence["SymbolicState"], "Task"], None]
"""Function (the symbolic state of each rank that takes part, task) -> None."""

Price = Callable[["Task", Costs], Duration]


@dataclass(frozen=True, eq=False)
class Operation:
    """Work of one kind: its effect on tensors, its effect on symbolic values, and its cost."""

    name: str
    act: Act | None
    """Function that does the work; None where the outside program does it."""
    symbolic: SymbolicEffect = lambda _, __: None
    price: Price = free
    role: Role = Role.LOCAL
    letter: str = ""
    """Letter in drawings; empty for the first letter of its name."""
    parted: bool = False
    """True for a sum of which the overlap `phases` may make three tasks."""

    def __repr__(self) -> str:
        return self.name


class Task(NamedTuple):
    """Operation on certain values."""

    operation: Operation
    key: int
    """Key of its bucket, from 1 on; number of its parameter (forward) or of its exchange (activations), from 0 on."""
    lane: str
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    group: RankGroup | None = None
    parameters: tuple[int, ...] = ()
    """Parameters that it acts on, where the bucket does not define them (update)."""
    peer: int | None = None
    """Other rank of a send or a receive."""

    def __str__(self) -> str:
        return f"{self.operation.name} {self.key}"


StepProgram = tuple[Task, ...]
"""Tasks of one rank, in program order."""


class Step(NamedTuple):
    """Event: the outside program trains on its next batch."""

    number: int
    synchronize: bool = True
    """False: the gradients of this rank alone are added to those of the next step (accumulation)."""


class Arrival(NamedTuple):
    """Event of a server: the exchange of a worker is the next that it serves."""

    number: int
    """Number of exchanges that the server has served before."""
    worker: int


weights = partial(Value, "weights")
"""Weights of a parameter, by its number."""

gradient = partial(Value, "gradient")
"""Gradient of a parameter, of this rank alone."""

state = partial(Value, "state")
"""State that the optimizer keeps for a parameter."""

bucket = partial(Value, "bucket")
"""Memory of a bucket, by its key."""

order = partial(Value, "order")
"""Dummy value that keeps the tasks of one communicator in order, by its number."""


def thread(lane: str) -> Value:
    """Return the dummy value that keeps the tasks of a lane's only thread in program order."""
    return Value(f"thread {lane}", 0)


def dependencies(program: Iterable[Task]) -> list[list[int]]:
    """Return, for each task, the tasks it waits for by rule 1: the last writer of each value it touches, and all
    readers since then of each value it writes.

    Linear in the number of touched values. A dependency that follows from others may be left out.
    """
    writer: dict[Value, int] = {}
    readers: dict[Value, list[int]] = {}
    waits: list[list[int]] = []
    for place, task in enumerate(program):
        before = {writer[value] for value in (*task.reads, *task.writes) if value in writer}
        for value in task.writes:
            before.update(readers.pop(value, ()))
            writer[value] = place
        for value in task.reads:
            if value not in task.writes:
                readers.setdefault(value, []).append(place)
        before.discard(place)
        waits.append(sorted(before))
    return waits
