"""Order of operations, without threads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.dependencies import Failure, PendingOperation, Variable, complete, enqueue


def test_the_drawn_example() -> None:
    a, b, c = Variable("A"), Variable("B"), Variable("C")
    first, second, third = (
        PendingOperation("1", [a], [b]),
        PendingOperation("2", [a], [c]),
        PendingOperation("3", [c], [a]),
    )
    assert [enqueue(first), enqueue(second), enqueue(third)] == [True, True, False]
    assert third.open == 2
    assert complete(first) == []
    assert complete(second) == [third]


def test_reading_and_mutating_counts_as_mutating() -> None:
    a = Variable()
    assert PendingOperation("both", [a, a], [a, a]).variables == ((a, True),)
    assert PendingOperation("both", [a, a], [a]).variables == ((a, True),)


def test_a_read_behind_a_write_waits_though_others_read() -> None:
    a = Variable()
    first, write, second = (
        PendingOperation("first", [a], []),
        PendingOperation("write", [], [a]),
        PendingOperation("second", [a], []),
    )
    assert [enqueue(first), enqueue(write), enqueue(second)] == [True, False, False]
    assert complete(first) == [write]
    assert complete(write) == [second]


def test_a_failure_is_passed_on() -> None:
    a, b = Variable(), Variable()
    first, second = PendingOperation("one", [], [a]), PendingOperation("two", [a], [b])
    enqueue(first), enqueue(second)
    first.failure = Failure("one", ValueError("gone"))
    assert complete(first) == [second]
    assert second.failure is first.failure
    complete(second)
    assert b.failure is first.failure


@given(st.data())
def test_no_deadlock_and_no_conflicting_operations_at_once(data: st.DataObject) -> None:
    """Operations of any kind, ended in any order that is possible."""
    variables = [Variable(str(place)) for place in range(4)]
    some = st.lists(st.sampled_from(variables), max_size=3)
    waiting = [
        PendingOperation(str(index), data.draw(some), data.draw(some)) for index in range(data.draw(st.integers(0, 12)))
    ]
    running, ended = list[PendingOperation](), list[PendingOperation]()
    pushed = 0
    while pushed < len(waiting) or running:
        if pushed < len(waiting) and (not running or data.draw(st.booleans())):
            if enqueue(waiting[pushed]):
                running.append(waiting[pushed])
            pushed += 1
        else:
            over = running.pop(data.draw(st.integers(0, len(running) - 1)))
            running += complete(over)
            ended.append(over)
        for operation in running:
            for other in running:
                if operation is not other:
                    mutated = {variable for variable, mutates in operation.variables if mutates}
                    assert mutated.isdisjoint(variable for variable, _ in other.variables)
    assert sorted(int(operation.name) for operation in ended) == list(range(len(waiting)))
