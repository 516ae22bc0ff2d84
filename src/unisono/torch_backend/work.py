"""Handle of an operation under way.

An error must reach every caller, in whatever way it waits. A Future of PyTorch that was given an exception loses it in
C++, where DistributedDataParallel waits. So the future always succeeds, and callers get a second one:

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
    """Handle that every operation returns. `name` is the operation, `result` the value of its future.

    `event` is the profiler's event of the operation, if a profiler is active.
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
        """Mark the operation as over, with its error if it failed. Called once, by the thread that carried it out."""
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
        """Wait until the operation is over, for `timeout` at most if one is given, and return True.

        Raises BackendError when the operation has failed or `timeout` has passed.
        """
        if not self._ended:
            self._await(timeout.total_seconds() if timeout > NO_TIMEOUT else None)
        if self._error is not None:
            raise BackendError(*self._error.args) from self._error.__cause__
        return True

    def _await(self, seconds: float | None) -> None:
        """Wait for `seconds`, without limit for None; an operation has a timeout of its own too."""
        with self._lock:
            if self._ended:
                return
            self._event = self._event or threading.Event()
        if not self._event.wait(seconds):
            raise BackendError(f"{self._name}: Timed out waiting {seconds:g} s; it is still under way")

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True once the operation is over."""
        return self._ended

    def is_success(self) -> bool:
        """Return True if the operation is over and has succeeded."""
        return self._ended and self._error is None

    def exception(self) -> BackendError | None:
        """Return the error of the operation, or None."""
        return self._error

    def result(self) -> Any:
        """Wait, and return the tensors that the operation filled."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the operation fills."""
        with self._lock:
            first = self._future is None
            future: torch.futures.Future[Any] = self._future or torch.futures.Future()
            self._future, ended = future, self._ended
        if first and ended:
            future.set_result(None)
        return future.then(self._result_or_error)

    def _result_or_error(self, _: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise BackendError(*self._error.args) from self._error.__cause__
        return self._result


class Deadline:
    """Time at which an operation times out."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """True once that time has passed."""
        return time.monotonic() > self._end
