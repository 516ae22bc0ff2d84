"""One operation at a time, in order; what fails is told to whoever waits."""

from __future__ import annotations

import threading
import time

import pytest

from unisono.errors import BackendError, MismatchError
from unisono.torch_backend.completions import Completions
from unisono.torch_backend.line import Line
from unisono.torch_backend.work import Work

Names = list[str]


def work(name: str = "all_reduce", result: object = None) -> Work:
    return Work(name, result, Completions())


def submit(line: Line, action: object, blocking: bool = False, seconds: float = 60) -> Work:
    return line.submit("all_reduce", action, work(), seconds, blocking)


def test_a_blocking_operation_stays_on_its_thread() -> None:
    seen: list[threading.Thread] = []
    submit(Line("0", 0, 1), lambda: seen.append(threading.current_thread()), blocking=True)
    assert seen == [threading.current_thread()]


def test_operations_keep_their_order() -> None:
    line, seen, gate = Line("0", 0, 1), [], threading.Event()
    submit(line, gate.wait)
    works = [submit(line, lambda number=number: seen.append(number), blocking=number == 3) for number in range(6)]
    assert not any(each.is_completed() for each in works)
    gate.set()
    for each in works:
        assert each.wait()
    assert seen == list(range(6))
    line.close()


def test_two_threads_never_carry_out_at_once() -> None:
    line, inside, most = Line("0", 0, 1), [0], [0]

    def action() -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(1e-3)
        inside[0] -= 1

    def many(blocking: bool) -> None:
        for _ in range(20):
            submit(line, action, blocking).wait()

    threads = [threading.Thread(target=many, args=(blocking,)) for blocking in (True, False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    line.close()


def fail() -> None:
    raise MismatchError("ranks differ")


@pytest.mark.parametrize("blocking", [False, True])
def test_errors_name_the_rank_and_the_operation(blocking: bool) -> None:
    line = Line("7", 2, 4)
    failed = submit(line, fail, blocking)
    with pytest.raises(BackendError, match="rank 2 of 4: all_reduce, number 1 of group 7: ranks differ") as caught:
        failed.wait()
    assert isinstance(caught.value.__cause__, MismatchError)
    assert failed.is_completed()
    assert not failed.is_success()
    with pytest.raises(RuntimeError, match="ranks differ"):
        failed.get_future().wait()
    assert submit(line, lambda: None, blocking).wait()
    line.close()


def test_futures_before_and_after_the_end() -> None:
    line, gate = Line("0", 0, 1), threading.Event()
    early = line.submit("all_reduce", gate.wait, work(result=["tensors"]), 60, False)
    futures = [early.get_future(), early.get_future()]
    gate.set()
    early.wait()
    assert [future.wait() for future in [*futures, early.get_future()]] == [["tensors"]] * 3
    line.close()


def test_a_time_that_is_over_ends_the_group() -> None:
    line = Line("0", 1, 2)
    line.absent = lambda number: f"not come: rank 0 to number {number}"

    def wait_for_ever() -> None:
        while True:
            line.check()

    late = submit(line, wait_for_ever, seconds=0.05)
    words = r"rank 1 of 2: all_reduce, number 1 of group 0: Timed out after 0.05 s; not come: rank 0 to number 1"
    with pytest.raises(BackendError, match=words):
        late.wait()
    with pytest.raises(BackendError, match="number 1"):
        submit(line, lambda: None, blocking=True).wait()
    line.close()


def test_a_wait_has_a_time_of_its_own() -> None:
    from datetime import timedelta

    line, gate = Line("0", 0, 1), threading.Event()
    slow = submit(line, gate.wait)
    with pytest.raises(BackendError, match=r"Timed out waiting 0\.05 s"):
        slow.wait(timedelta(seconds=0.05))
    gate.set()
    assert slow.wait(timedelta(seconds=60))
    line.close()
