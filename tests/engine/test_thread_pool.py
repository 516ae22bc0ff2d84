"""The threads for one kind of work."""

from __future__ import annotations

import gc
import threading
import weakref

from hypothesis import given
from hypothesis import strategies as st

from unisono.engine.engine import ThreadPool


def hold(pool: ThreadPool) -> threading.Event:
    """Keep one thread of a pool at work until the event is set; it is when this returns."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(20)

    pool.submit(wait)
    assert begun.wait(20)
    return go


def test_actions_run_in_order_of_submission() -> None:
    pool, seen = ThreadPool("update", 1), list[int]()
    go = hold(pool)
    for index in range(9):
        pool.submit(lambda index=index: seen.append(index))
    go.set()
    pool.close()
    assert seen == list(range(9))


def test_a_pool_runs_as_many_actions_as_threads() -> None:
    """Three that each wait until all three are there, on threads that tell what they are for."""
    pool, there, names = ThreadPool("communication", 3), threading.Barrier(3, timeout=20), list[str]()

    def meet() -> None:
        there.wait()
        names.append(threading.current_thread().name)

    for _ in range(3):
        pool.submit(meet)
    pool.close()
    assert sorted(names) == [f"unisono communication {index}" for index in range(3)]


def test_no_thread_before_the_first_action() -> None:
    before = threading.active_count()
    pool = ThreadPool("update", 2)
    assert threading.active_count() == before
    pool.close()


@given(threads=st.integers(1, 4), actions=st.integers(0, 30), rounds=st.integers(1, 3))
def test_closing_waits_for_all_and_a_closed_pool_starts_again(threads: int, actions: int, rounds: int) -> None:
    before, pool = threading.active_count(), ThreadPool("update", threads)
    for _ in range(rounds):
        seen = list[int]()
        for index in range(actions):
            pool.submit(lambda index=index, seen=seen: seen.append(index))
        pool.close()
        assert sorted(seen) == list(range(actions))
        assert threading.active_count() == before
        pool.close()  # has nothing to do


def test_an_action_may_submit_another_before_the_pool_is_closed() -> None:
    pool, seen, done = ThreadPool("update", 1), list[str](), threading.Event()

    def second() -> None:
        seen.append("second")
        done.set()

    pool.submit(lambda: (seen.append("first"), pool.submit(second)))
    assert done.wait(20)
    pool.close()
    assert seen == ["first", "second"]


def test_an_unreferenced_pool_ends_its_threads() -> None:
    pool, workers, seen = ThreadPool("update", 2), list[threading.Thread](), list[int]()
    there, go = threading.Barrier(3, timeout=20), threading.Event()

    def work() -> None:
        workers.append(threading.current_thread())
        there.wait()
        go.wait(20)

    for _ in range(2):
        pool.submit(work)
    there.wait()
    for index in range(5):
        pool.submit(lambda index=index: seen.append(index))
    assert len(workers) == 2 and all(thread.is_alive() for thread in workers)
    del pool
    gc.collect()
    go.set()
    for thread in workers:
        thread.join(20)
    assert not any(thread.is_alive() for thread in workers)
    assert sorted(seen) == list(range(5))


def test_a_finished_action_is_released() -> None:
    """An idle thread holds nothing of its last action."""

    class Large:
        pass

    gone, done = threading.Event(), threading.Event()
    pool, large = ThreadPool("update", 1), Large()
    weakref.finalize(large, gone.set)
    pool.submit(lambda large=large: done.set())
    del large
    assert done.wait(20)
    assert gone.wait(20)
    pool.close()
