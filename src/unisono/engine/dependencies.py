"""What waits for what: operations read and mutate variables, and each variable has a queue (MXNET-MPI section 3.1).

    1: reads A, mutates B        2: reads A, mutates C        3: reads C, mutates A

    A's queue   [1 reads] [2 reads] | [3 mutates]        1 and 2 go together, 3 when both are done
    B's queue   [1 mutates]
    C's queue   [2 mutates] | [3 reads]
    open        1: 0    2: 0    3: 2 (A and C)

An operation is ready when all its variables let it: reads that follow each other go together, what mutates goes alone,
all in the order in which they came. So whatever runs at once, each variable has the history of the serial execution.

An operation that fails leaves what it should have mutated spoilt. Whatever needs that is not carried out: it fails with
the same failure, and leaves spoilt what it should have mutated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Failure(NamedTuple):
    """Where something went wrong first."""

    operation: str
    error: BaseException


class Variable:
    """A tag for what operations read and mutate. `name` is for people."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.failure: Failure | None = None
        """What has spoilt it."""
        self._queue: deque[tuple[Operation, bool]] = deque()  # who waits, and whether it mutates
        self._readers = 0
        self._mutating = False

    def enter(self, operation: Operation, mutates: bool) -> None:
        """Queue up."""
        self._queue.append((operation, mutates))

    def leave(self, operation: Operation, mutates: bool) -> None:
        """An operation that was let in is done."""
        if mutates:
            self._mutating = False
            self.failure = self.failure or operation.failure
        else:
            self._readers -= 1

    def let_in(self) -> Iterable[Operation]:
        """Those at the head of the queue whose turn it is."""
        while self._queue and not self._mutating:
            operation, mutates = self._queue[0]
            if mutates and self._readers:
                return
            self._queue.popleft()
            if mutates:
                self._mutating = True
            else:
                self._readers += 1
            yield operation


class Turn(Variable):
    """Lets operations go one at a time, in their order. No failure is passed on: none needs what another one did."""

    def leave(self, operation: Operation, mutates: bool) -> None:
        """An operation that was let in is done."""
        super().leave(operation, mutates)
        self.failure = None


@dataclass(eq=False)
class Operation:
    """Something to be carried out once all its variables let it."""

    name: str
    read: tuple[Variable, ...]
    mutate: tuple[Variable, ...]
    open: int = 0
    """Variables that have not let it in."""
    failure: Failure | None = None


def make(name: str, read: Iterable[Variable], mutate: Iterable[Variable]) -> Operation:
    """An operation; what it reads and mutates, it mutates."""
    mutated = dict.fromkeys(mutate)
    return Operation(name, tuple(one for one in dict.fromkeys(read) if one not in mutated), tuple(mutated))


def add(operation: Operation) -> bool:
    """Queue the operation up at all its variables; whether it is ready."""
    variables = [*((one, False) for one in operation.read), *((one, True) for one in operation.mutate)]
    operation.open = len(variables)
    for variable, mutates in variables:
        variable.enter(operation, mutates)
    for variable, _ in variables:
        for other in variable.let_in():
            assert other is operation, "whoever else could be let in has been"
            operation.open -= 1
    if not operation.open:
        _inherit(operation)
    return not operation.open


def done(operation: Operation) -> list[Operation]:
    """The operation is over; those that are ready now, in the order of its variables."""
    ready: list[Operation] = []
    for variables, mutates in ((operation.read, False), (operation.mutate, True)):
        for variable in variables:
            variable.leave(operation, mutates)
            for other in variable.let_in():
                other.open -= 1
                if not other.open:
                    _inherit(other)
                    ready.append(other)
    return ready


def _inherit(operation: Operation) -> None:
    """What has spoilt a variable spoils those that need it."""
    for variable in (*operation.read, *operation.mutate):
        operation.failure = operation.failure or variable.failure
