"""The watchdog of one process, with a store in memory and the entries that other ranks would have written there."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from unisono.errors import BackendError
from unisono.torch_backend.submission_queue import SubmissionQueue
from unisono.torch_backend.watchdog import Watchdog
from unisono.torch_backend.work import Completions, Work


def submit(queue: SubmissionQueue, seconds: float) -> Work:
    """A collective that waits until its queue has failed."""

    def wait_in_vain() -> None:
        while True:
            queue.check()
            time.sleep(0.01)

    return queue.submit(wait_in_vain, Work("all_reduce", None, seconds, Completions()), blocking=False)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def queue(store: HashStore) -> SubmissionQueue:
    """The watched queue of rank 0 of 3."""
    queue = SubmissionQueue("0", 0, 3)
    Watchdog().watch(queue, store)
    return queue


def test_missing_ranks_are_named(queue: SubmissionQueue, store: HashStore) -> None:
    store.set("1", "6 broadcast")
    store.set("2", "7 all_reduce")
    assert queue.describe_missing(7) == "missing: rank 1 (last in broadcast, number 6)"
    assert queue.describe_missing(6) == ""
    assert queue.describe_missing(8).endswith("rank 2 (last in all_reduce, number 7)")


def test_a_rank_that_has_published_nothing(queue: SubmissionQueue) -> None:
    assert queue.describe_missing(1) == "missing: rank 1 (not seen yet), rank 2 (not seen yet)"


def test_a_rank_that_has_exited(queue: SubmissionQueue, store: HashStore) -> None:
    assert not queue.has_exited(1)
    other = Watchdog()
    other.watch(SubmissionQueue("0", 1, 3), store)
    other.publish_exit()
    assert queue.has_exited(1)
    assert not queue.has_exited(2)


def test_a_wait_for_a_rank_that_exits_fails(queue: SubmissionQueue, store: HashStore) -> None:
    work = submit(queue, seconds=60)
    other = Watchdog()
    other.watch(SubmissionQueue("0", 2, 3), store)
    other.publish_exit()
    with pytest.raises(BackendError, match=r"rank 0 of 3: all_reduce, number 1 .* rank 2 has ended its program"):
        work.wait()


def test_a_timeout_names_the_missing_ranks(queue: SubmissionQueue, store: HashStore) -> None:
    store.set("1", "1 all_reduce")
    with pytest.raises(BackendError, match=r"number 1 of group 0: Timed out after 0.2 s; missing: rank 2 \(not seen"):
        submit(queue, seconds=0.2).wait()


def test_an_ended_queue_is_not_watched(store: HashStore) -> None:
    queue, watchdog = SubmissionQueue("0", 1, 3), Watchdog()
    watchdog.watch(queue, store)
    watchdog.unwatch(queue)
    watchdog.publish_exit()
    assert not store.check(["1"])
