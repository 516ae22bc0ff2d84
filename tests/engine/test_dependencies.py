"""Who may go when, without any thread."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.dependencies import Failure, Operation, Variable, add, done, make


def test_the_drawn_example() -> None:
    a, b, c = Variable("A"), Variable("B"), Variable("C")
    one, two, three = make("1", [a], [b]), make("2", [a], [c]), make("3", [c], [a])
    assert [add(one), add(two), add(three)] == [True, True, False]
    assert three.open == 2
    assert done(one) == []
    assert done(two) == [three]


def test_what_is_read_and_mutated_is_mutated() -> None:
    a = Variable()
    assert make("both", [a, a], [a, a]).mutate == (a,)
    assert make("both", [a, a], [a]).read == ()


def test_a_read_behind_a_write_waits_though_others_read() -> None:
    a = Variable()
    first, write, second = make("first", [a], []), make("write", [], [a]), make("second", [a], [])
    assert [add(first), add(write), add(second)] == [True, False, False]
    assert done(first) == [write]
    assert done(write) == [second]


def test_a_failure_goes_on() -> None:
    a, b = Variable(), Variable()
    one, two = make("one", [], [a]), make("two", [a], [b])
    add(one), add(two)
    one.failure = Failure("one", ValueError("gone"))
    assert done(one) == [two]
    assert two.failure is one.failure
    done(two)
    assert b.failure is one.failure


@given(st.data())
def test_nothing_waits_for_ever_and_nothing_that_meets_runs_at_once(data: st.DataObject) -> None:
    """Operations of any kind, ended in any order that is possible."""
    variables = [Variable(str(place)) for place in range(4)]
    some = st.lists(st.sampled_from(variables), max_size=3)
    waiting = [make(str(number), data.draw(some), data.draw(some)) for number in range(data.draw(st.integers(0, 12)))]
    running, ended = list[Operation](), list[Operation]()
    pushed = 0
    while pushed < len(waiting) or running:
        if pushed < len(waiting) and (not running or data.draw(st.booleans())):
            if add(waiting[pushed]):
                running.append(waiting[pushed])
            pushed += 1
        else:
            over = running.pop(data.draw(st.integers(0, len(running) - 1)))
            running += done(over)
            ended.append(over)
        for one in running:
            for other in running:
                if one is not other:
                    assert not set(one.mutate) & {*other.read, *other.mutate}
    assert sorted(int(one.name) for one in ended) == list(range(len(waiting)))
