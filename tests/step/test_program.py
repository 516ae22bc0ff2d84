"""Dependencies follow from values alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.step.operations import BARRIER, PACK, UPDATE
from unisono.step.program import Task, Value, dependencies, order, thread, weights

values = st.builds(Value, st.sampled_from("abc"), st.integers(0, 1))
tasks = st.builds(
    lambda reads, writes: Task(PACK, 0, "update", tuple(reads), tuple(writes)),
    st.sets(values, max_size=3),
    st.sets(values, max_size=2),
)


def touches(task: Task, other: Task) -> bool:
    """Whether two tasks touch the same value, one of them writing it."""
    return bool({*task.writes} & {*other.reads, *other.writes} or {*other.writes} & {*task.reads})


@given(st.lists(tasks, max_size=12))
def test_only_tasks_that_share_a_written_value_are_ordered(program: list[Task]) -> None:
    """The dependencies, and what follows from them, are those of each pair."""
    waits = dependencies(program)
    reached: list[set[int]] = []
    for before in waits:
        reached.append(set(before).union(*(reached[earlier] for earlier in before)))
    wanted: list[set[int]] = []
    for index, task in enumerate(program):
        direct = {earlier for earlier in range(index) if touches(program[earlier], task)}
        assert set(waits[index]) <= direct
        wanted.append(direct.union(*(wanted[earlier] for earlier in direct)))
    assert reached == wanted


def test_a_chain_has_as_many_dependencies_as_tasks() -> None:
    """Linear: readers since the last writer wait for it alone, and the next writer for them."""
    chain = [Task(PACK, n, "update", (), (order(0),)) for n in range(1000)]
    assert dependencies(chain) == [[], *([n] for n in range(999))]
    readers = [Task(PACK, n, "update", (weights(0),)) for n in range(1000)]
    write = Task(UPDATE, 0, "update", (), (weights(0),))
    assert sum(map(len, dependencies([write, *readers, write]))) == 1000 + 1001


def test_the_text_of_a_task() -> None:
    assert str(Task(BARRIER, 4, "main")) == "barrier 4"
    assert repr(BARRIER) == "barrier"
    assert thread("main") == ("thread main", 0)
