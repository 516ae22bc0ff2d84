"""Dependencies: operations read and mutate variables, and each variable has a queue (MXNET-MPI section 3.1).

    1: reads A, mutates B        2: reads A, mutates C        3: reads C, mutates A

    A's queue   [1 reads] [2 reads] | [3 mutates]        1 and 2 go together, 3 when both are done
    B's queue   [1 mutates]
    C's queue   [2 mutates] | [3 reads]
    open        1: 0    2: 0    3: 2 (A and C)

An operation is ready when all its variables admit it. Consecutive reads of a variable run together, a mutation runs
alone, all in order of arrival. So each variable has the history of the serial execution, whatever runs concurrently.

An operation that fails spoils the variables that it should have mutated. An operation that needs a spoilt variable is
not carried out: it fails with the same failure, and spoils the variables that it should have mutated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Failure(NamedTuple):
    """First failure: the name of the operation, and its error."""

    operation: str
    error: BaseException


class Variable:
    """Tag for data that operations read and mutate. `name` is used in messages."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.failure: Failure | None = None
        """Failure that has spoilt the variable; None while it is good."""
        self.queue: deque[tuple[PendingOperation, bool]] = deque()  # waiting operations; True for those that mutate
        self._readers = 0
        self._mutating = False

    def leave(self, operation: PendingOperation, mutates: bool) -> None:
        """Remove an admitted operation that is over."""
        if mutates:
            self._mutating = False
            self.failure = self.failure or operation.failure
        else:
            self._readers -= 1

    def admit(self) -> Iterable[PendingOperation]:
        """Admit and yield the operations at the head of the queue that may run now."""
        while self.queue and not self._mutating:
            operation, mutates = self.queue[0]
            if mutates and self._readers:
                return
            self.queue.popleft()
            if mutates:
                self._mutating = True
            else:
                self._readers += 1
            yield operation


class ExclusiveVariable(Variable):
    """Variable that admits one operation at a time, in order. No failure is passed on: none needs another's result."""

    def leave(self, operation: PendingOperation, mutates: bool) -> None:
        """Remove an admitted operation that is over."""
        super().leave(operation, mutates)
        self.failure = None


class PendingOperation:
    """Operation to be carried out once all its variables admit it."""

    def __init__(self, name: str, read: Iterable[Variable], mutate: Iterable[Variable]) -> None:
        """Name the operation; a variable that it both reads and mutates counts as mutated."""
        mutated = dict.fromkeys(mutate)
        self.name, reads = name, (variable for variable in dict.fromkeys(read) if variable not in mutated)
        self.variables = (*((variable, False) for variable in reads), *((variable, True) for variable in mutated))
        """Variables that it needs; True for those that it mutates."""
        self.open = len(self.variables)
        """Number of variables that have not admitted it."""
        self.failure: Failure | None = None


def enqueue(operation: PendingOperation) -> bool:
    """Queue the operation up at all its variables. Return True if it is ready."""
    for variable, mutates in operation.variables:
        variable.queue.append((operation, mutates))
    admitted = _admit(operation)
    assert all(each is operation for each in admitted), "all others that could be admitted have been"
    return not operation.open


def complete(operation: PendingOperation) -> list[PendingOperation]:
    """End the operation. Return those that are ready now, in the order of its variables."""
    for variable, mutates in operation.variables:
        variable.leave(operation, mutates)
    return _admit(operation)


def _admit(operation: PendingOperation) -> list[PendingOperation]:
    """Let the operation's variables admit others. Those that are ready take over the failure of any that they need."""
    ready: list[PendingOperation] = []
    for variable, _ in operation.variables:
        for admitted in variable.admit():
            admitted.open -= 1
            if not admitted.open:
                for needed, _ in admitted.variables:
                    admitted.failure = admitted.failure or needed.failure
                ready.append(admitted)
    return ready
