"""One operation at a time, in order; errors reach every caller that waits. Completions run one after another, and more
at once when one waits for another."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from unisono.collectives.states import Calls
from unisono.errors import BackendError, MismatchError, StallError
from unisono.torch_backend.work import Completions, SubmissionQueue, Work

Names = list[str]


def work(result: object = None, seconds: float = 60) -> Work:
    return Work("all_reduce", result, seconds, Completions())


def queue_of(group: str, rank: int, size: int) -> SubmissionQueue:
    return SubmissionQueue(group, rank, size, Calls(group, range(size)))


def submit(queue: SubmissionQueue, action: object, blocking: bool = False, seconds: float = 60) -> Work:
    return queue.submit(action, work(seconds=seconds), blocking)


def test_a_blocking_operation_stays_on_its_thread() -> None:
    seen: list[threading.Thread] = []
    submit(queue_of("0", 0, 1), lambda: seen.append(threading.current_thread()), blocking=True)
    assert seen == [threading.current_thread()]


def test_operations_keep_their_order() -> None:
    queue, seen, gate = queue_of("0", 0, 1), [], threading.Event()
    submit(queue, gate.wait)
    works = [submit(queue, lambda index=index: seen.append(index), blocking=index == 3) for index in range(6)]
    assert not any(each.is_completed() for each in works)
    gate.set()
    for each in works:
        assert each.wait()
    assert seen == list(range(6))
    queue.close()


def test_operations_of_several_threads_never_overlap() -> None:
    queue, inside, most = queue_of("0", 0, 1), [0], [0]

    def action() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(1e-3)
        inside[0] -= 1

    def many(blocking: bool) -> None:
        for _ in range(20):
            submit(queue, action, blocking).wait()

    threads = [threading.Thread(target=many, args=(blocking,)) for blocking in (True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    queue.close()


def fail() -> None:
    raise MismatchError("ranks differ")


def test_an_interrupted_operation_has_failed() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    queue, under_way = queue_of("0", 0, 2), work()
    with pytest.raises(KeyboardInterrupt):
        queue.submit(interrupt, under_way, True)
    with pytest.raises(BackendError, match="rank 0 of 2: all_reduce, number 1 of group 0: KeyboardInterrupt"):
        under_way.wait()  # by another thread, which must not read half a result


@pytest.mark.parametrize("blocking", [False, True])
def test_errors_name_the_rank_and_the_operation(blocking: bool) -> None:
    queue = queue_of("7", 2, 4)
    failed = submit(queue, fail, blocking)
    with pytest.raises(BackendError, match="rank 2 of 4: all_reduce, number 1 of group 7: ranks differ") as caught:
        failed.wait()
    assert isinstance(caught.value.__cause__, MismatchError)
    assert failed.is_completed()
    assert not failed.is_success()
    with pytest.raises(RuntimeError, match="ranks differ"):
        failed.get_future().wait()
    assert submit(queue, lambda: None, blocking).wait()
    queue.close()


def test_after_the_end_an_operation_fails() -> None:
    queue = queue_of("3", 1, 2)
    submit(queue, lambda: None).wait()
    queue.close()
    ending = submit(queue, lambda: None)
    assert ending.is_completed(), "no thread would ever end it"
    with pytest.raises(BackendError, match="rank 1 of 2: all_reduce, number 2 of group 3: the group ends; submit it"):
        ending.wait()
    assert submit(queue, lambda: None, blocking=True).wait(), "as programs do when they exit"
    queue.ended = "rank 1: group 3 was destroyed"
    for blocking in (False, True):
        with pytest.raises(BackendError, match="rank 1: group 3 was destroyed"):
            submit(queue, lambda: None, blocking).wait()


def test_futures_before_and_after_the_end() -> None:
    queue, gate = queue_of("0", 0, 1), threading.Event()
    early = queue.submit(gate.wait, work(["tensors"]), False)
    futures = [early.get_future(), early.get_future()]
    gate.set()
    early.wait()
    assert [future.wait() for future in [*futures, early.get_future()]] == [["tensors"]] * 3
    queue.close()


def test_a_timeout_ends_the_group() -> None:
    queue = queue_of("0", 1, 2)

    def wait_forever() -> None:
        while True:
            queue.calls.check()

    late = submit(queue, wait_forever, seconds=0.05)
    assert not late.is_completed()
    assert queue.calls.timeout == 0.05
    queue.calls.fail(StallError, "Timed out after 0.05 s: missing: rank 0")
    message = "rank 1 of 2: all_reduce, number 1 of group 0: Timed out after 0.05 s: missing: rank 0"
    with pytest.raises(BackendError, match=message):
        late.wait()
    with pytest.raises(BackendError, match=f"^{message}$"):
        submit(queue, queue.calls.check, blocking=True).wait()
    queue.close()


def test_a_wait_has_its_own_timeout() -> None:
    from datetime import timedelta

    queue, gate = queue_of("0", 0, 1), threading.Event()
    slow = submit(queue, gate.wait)
    with pytest.raises(BackendError, match=r"Timed out waiting 0\.05 s"):
        slow.wait(timedelta(seconds=0.05))
    gate.set()
    assert slow.wait(timedelta(seconds=60))
    queue.close()


def test_a_callback_may_wait_for_a_later_completion() -> None:
    completions, inner, outer = Completions(), threading.Event(), threading.Event()

    def wait_for_inner() -> None:
        completions.submit(inner.set)
        assert inner.wait(10)
        outer.set()

    completions.submit(wait_for_inner)
    assert outer.wait(10)


def test_no_more_threads_than_are_needed() -> None:
    completions = Completions()
    before = threading.active_count()
    for _ in range(50):
        done = threading.Event()
        completions.submit(done.set)
        assert done.wait(10)
    assert threading.active_count() - before <= 2


def test_the_end_waits_for_what_was_submitted() -> None:
    completions, done = Completions(), list[int]()

    before = threading.active_count()
    for index in range(2):
        completions.submit(partial(done.append, index))
    completions.close(10)
    assert sorted(done) == [0, 1]
    assert threading.active_count() <= before
