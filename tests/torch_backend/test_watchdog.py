"""The watchdog of one process, with a store in memory and what other ranks would have written there."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from unisono.errors import BackendError
from unisono.torch_backend.completions import Completions
from unisono.torch_backend.line import Line
from unisono.torch_backend.watchdog import Watchdog
from unisono.torch_backend.work import Work


def submit(line: Line, seconds: float) -> Work:
    """A collective that waits until its line gives it up."""

    def wait_in_vain() -> None:
        while True:
            line.check()
            time.sleep(0.01)

    return line.submit("all_reduce", wait_in_vain, Work("all_reduce", None, Completions()), seconds, blocking=False)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def line(store: HashStore) -> Line:
    """The line of rank 0 of 3, watched."""
    line = Line("0", 0, 3)
    Watchdog().watch(line, store)
    return line


def test_who_has_not_come_is_named(line: Line, store: HashStore) -> None:
    store.set("1", "6 broadcast")
    store.set("2", "7 all_reduce")
    assert line.absent(7) == "not come: rank 1 (last in broadcast, number 6)"
    assert line.absent(6) == ""
    assert line.absent(8).endswith("rank 2 (last in all_reduce, number 7)")


def test_a_rank_that_was_never_seen(line: Line) -> None:
    assert line.absent(1) == "not come: rank 1 (not seen yet), rank 2 (not seen yet)"


def test_who_has_left(line: Line, store: HashStore) -> None:
    assert not line.gone(1)
    other = Watchdog()
    other.watch(Line("0", 1, 3), store)
    other.leave()
    assert line.gone(1)
    assert not line.gone(2)


def test_a_wait_for_a_rank_that_leaves_ends(line: Line, store: HashStore) -> None:
    work = submit(line, seconds=60)
    other = Watchdog()
    other.watch(Line("0", 2, 3), store)
    other.leave()
    with pytest.raises(BackendError, match=r"rank 0 of 3: all_reduce, number 1 .* rank 2 has ended its program"):
        work.wait()


def test_a_time_out_names_who_has_not_come(line: Line, store: HashStore) -> None:
    store.set("1", "1 all_reduce")
    with pytest.raises(BackendError, match=r"number 1 of group 0: Timed out after 0.2 s; not come: rank 2 \(not seen"):
        submit(line, seconds=0.2).wait()


def test_a_line_that_has_ended_is_not_watched(store: HashStore) -> None:
    line, watchdog = Line("0", 1, 3), Watchdog()
    watchdog.watch(line, store)
    watchdog.forget(line)
    watchdog.leave()
    assert not store.check(["1"])
