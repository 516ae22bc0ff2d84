"""What every embedding promises, of its tasks alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.embeddings import EMBEDDINGS, MAIN, Task, buffer, find_embedding, gradient
from unisono.errors import UsageError

NAMES = st.sampled_from(sorted(EMBEDDINGS))


def tasks_of(name: str, keys: int, outstanding: int) -> list[tuple[int, Task]]:
    """All tasks of a step in which each key is pushed and pulled, with their keys."""
    embedding = find_embedding(name)
    pushed = [(key, task) for key in range(keys) for task in embedding.push(key, outstanding)]
    return pushed + [(key, task) for key in range(keys) for task in embedding.pull(key, outstanding)]


@given(name=NAMES, keys=st.integers(0, 12), outstanding=st.integers(1, 4))
def test_each_key_is_packed_exchanged_and_unpacked_in_that_order(name: str, keys: int, outstanding: int) -> None:
    tasks = tasks_of(name, keys, outstanding)
    for key in range(keys):
        mine = [task for number, task in tasks if number == key and task.what != "barrier"]
        assert [task.what for task in mine] == ["pack", "exchange", "unpack"]
        pack, exchange, unpack = mine
        assert gradient(key) in pack.read and buffer(key) in pack.mutate
        assert buffer(key) in exchange.mutate
        assert buffer(key) in unpack.read and gradient(key) in unpack.mutate


@given(name=NAMES, keys=st.integers(0, 12), outstanding=st.integers(1, 4))
def test_exchanges_on_one_communicator_are_in_one_order(name: str, keys: int, outstanding: int) -> None:
    """They mutate a variable in common, or the main thread carries them out, in the order of the keys."""
    exchanges = [task for _, task in tasks_of(name, keys, outstanding) if task.what == "exchange"]
    for number in {task.communicator for task in exchanges}:
        mine = [task for task in exchanges if task.communicator == number]
        in_common = set.intersection(*({*task.mutate} for task in mine)) if len(mine) > 1 else {None}
        assert in_common or all(task.kind == MAIN for task in mine)
        keys_of = [tag[1] for task in mine for tag in task.mutate if tag[0] == "buffer"]
        assert keys_of == sorted(keys_of)


@given(keys=st.integers(1, 12), outstanding=st.integers(1, 4))
def test_concurrent_has_so_many_at_once_and_a_barrier_between(keys: int, outstanding: int) -> None:
    tasks = tasks_of("concurrent", keys, outstanding)
    at_once = 0
    for _, task in tasks:
        if task.what == "barrier":
            assert len(task.mutate) == outstanding
            at_once = 0
        elif task.what == "exchange":
            at_once += 1
            assert task.communicator < outstanding
        assert at_once <= outstanding


@given(keys=st.integers(0, 12), outstanding=st.integers(1, 4))
def test_none_is_the_funnel_after_the_backward_pass(keys: int, outstanding: int) -> None:
    assert tasks_of("none", keys, outstanding) == tasks_of("funnel", keys, outstanding)
    assert [name for name, embedding in EMBEDDINGS.items() if embedding.after] == ["none"]


def test_only_concurrent_has_several_exchanges_at_once() -> None:
    assert [name for name, embedding in EMBEDDINGS.items() if embedding.several] == ["concurrent"]


@given(name=NAMES, keys=st.integers(1, 12), outstanding=st.integers(1, 4))
def test_a_communicator_is_one_that_there_is(name: str, keys: int, outstanding: int) -> None:
    there = outstanding if find_embedding(name).several else 1
    assert all(task.communicator < there for _, task in tasks_of(name, keys, outstanding))


def test_an_unknown_embedding() -> None:
    with pytest.raises(UsageError, match=r"'tunnel'; there are funnel, concurrent, chain, none$"):
        find_embedding("tunnel")
