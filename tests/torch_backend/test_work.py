"""Completions run one after another, and more at once when one waits for another."""

from __future__ import annotations

import threading
from functools import partial

from unisono.torch_backend.work import Completions


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
