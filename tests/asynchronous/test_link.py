"""Links between workers and servers: how long an end waits for the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from unisono.asynchronous import link
from unisono.errors import StallError


class Request:
    """Message that arrives at the fourth poll."""

    def __init__(self) -> None:
        self._polls = count()

    def Test(self) -> bool:  # noqa: N802  mpi4py's
        return next(self._polls) == 3


def waited(monkeypatch: pytest.MonkeyPatch, times: Iterator[float], timeout: float) -> None:
    """Wait for a message at these times, from an end that is stopped."""
    monkeypatch.setattr(link, "time", SimpleNamespace(monotonic=lambda: next(times)))

    def poll(done: object, check: object, _: float) -> None:
        while not done():  # type: ignore[operator]
            check()  # type: ignore[operator]

    monkeypatch.setattr(link, "wait_until", poll)
    link.MpiLink(SimpleNamespace(rank=0), 1, False, timeout, lambda: True)._wait([Request()])


def test_the_time_in_which_this_process_was_stopped_itself_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waited(monkeypatch, iter([0.0, 0.1, 100.0, 100.1]), 30)


def test_an_end_that_is_stopped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StallError, match="rank 0 has waited 1 s for an exchange with the worker of rank 1"):
        waited(monkeypatch, iter([0.0, 0.6, 1.2, 1.8]), 30)
