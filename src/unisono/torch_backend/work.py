"""An operation under way, as its caller holds it.

An error must reach whoever waits, in whatever way they wait. A Future of PyTorch that was given an exception loses it
in C++, where DistributedDataParallel waits; so the future ends well, and what its callers get is a second one:

    communication thread ── error kept, event set ──▶ wait() raises
                         ── completions ──▶ future.set_result ──▶ then: raises the error  ◀── get_future()
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch

from unisono.errors import BackendError
from unisono.torch_backend.completions import Completions
from unisono.torch_backend.profiling import Event
from unisono.torch_backend.pytorch import WorkBase

NO_TIMEOUT = timedelta()


class Work(WorkBase):  # type: ignore[misc]  # untyped
    """What every operation returns. `name` says which it is, `result` is what its future will hold.

    `event` is the operation in the eyes of the profiler, if one looks.
    """

    def __init__(self, name: str, result: Any, completions: Completions, event: Event | None = None) -> None:
        super().__init__()
        self._name = name
        self._result = result
        self._completions = completions
        self._profiled = event
        self._error: BackendError | None = None
        self._ended = False
        self._event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def end(self, error: BackendError | None = None) -> None:
        """The operation is over. Called once, by whoever carried it out."""
        if self._profiled is not None:
            self._profiled.end(self._completions)
        with self._lock:
            self._error, self._ended = error, True
            event, future = self._event, self._future
        if event is not None:
            event.set()
        if future is not None:
            self._completions.submit(lambda: future.set_result(None))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is over, for `timeout` at most where one is given. Raises BackendError when it has failed."""
        if not self._ended:
            self._await(timeout.total_seconds() if timeout > NO_TIMEOUT else None)
        if self._error is not None:
            raise BackendError(*self._error.args) from self._error.__cause__
        return True

    def _await(self, seconds: float | None) -> None:
        """Wait, however long it takes; an operation has a time-out of its own too."""
        with self._lock:
            if self._ended:
                return
            self._event = self._event or threading.Event()
        if not self._event.wait(seconds):
            raise BackendError(f"{self._name}: Timed out waiting {seconds:g} s; it is still under way")

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._ended

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._ended and self._error is None

    def exception(self) -> BackendError | None:
        """What went wrong, if anything did."""
        return self._error

    def result(self) -> Any:
        """The tensors that it filled."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors that it fills."""
        with self._lock:
            first = self._future is None
            future: torch.futures.Future[Any] = self._future or torch.futures.Future()
            self._future, ended = future, self._ended
        if first and ended:
            future.set_result(None)
        return future.then(self._tell)

    def _tell(self, _: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise BackendError(*self._error.args) from self._error.__cause__
        return self._result


class Deadline:
    """When an operation's time is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether it is."""
        return time.monotonic() > self._end
