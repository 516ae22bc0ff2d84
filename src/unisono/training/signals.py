"""Signals that ask a run for a checkpoint: SIGUSR1 saves at the end of the step, SIGTERM saves and ends.

    kill -TERM ─▶ wake-up pipe ─▶ a thread ─▶ request("stop") ─▶ control word of the step ─▶ all ranks save, exit 143

A thread reads them, since Python's own handlers run only when the main thread returns from native code. They may be
sent to any one rank: the other ranks get the request in the next step.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

Request = Literal["save", "stop"]

REQUESTS: dict[int, Request] = {signal.SIGUSR1: "save", signal.SIGTERM: "stop"}

STOPPED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as shells define it."""

ONE = 1.0
"""Seconds within which SIGTERMs count as one: a batch system, `timeout` and the launcher may each forward it."""

LONG = 30.0
"""Seconds after which a warning is printed about a step that has not ended."""


def meaning(number: int, since_term: float | None) -> Request | Literal["end"] | None:
    """Return the meaning of a signal. `since_term` is the seconds since the first SIGTERM; None: there was none."""
    if number == signal.SIGTERM and since_term is not None:
        return "end" if since_term >= ONE else None
    return REQUESTS.get(number)


class Signals:
    """Within the block, signals to this process call `request`, or `end` for a second SIGTERM.

    `warn` is called with a line when a step takes long after a signal. Off the main thread, where Python has no
    signals, nothing is changed.
    """

    def __init__(
        self, request: Callable[[Request], None], end: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        self._request, self._end, self._warn = request, end, warn
        self.stop = False
        """True once SIGTERM has come to this rank."""
        self.asked: float | None = None
        """Time of the last signal that has not been answered, by `time.monotonic`; None: there is none."""
        self._name = ""
        self._term: float | None = None
        self._before: dict[int, object] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _leave_to_the_thread) for number in REQUESTS}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # as `signal` gave it
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
        self._thread = None

    def answered(self) -> None:
        """Note that a checkpoint was written: no request is pending any more."""
        self.asked = None

    def _listen(self) -> None:
        while True:
            numbers = os.read(self._reader, 64) if select.select([self._reader], [], [], self._patience())[0] else b""
            if 0 in numbers:
                return
            for number in numbers:
                self._take(number)
            if not numbers and self.asked is not None:
                self._warn(
                    f"{self._name} came {LONG:.0f} s ago, and the step still goes on: a checkpoint is written at its "
                    "end (a second SIGTERM ends the run at once, without one)"
                )
                self.asked = None

    def _take(self, number: int) -> None:
        now = time.monotonic()
        asks = meaning(number, None if self._term is None else now - self._term)
        if asks == "end":
            self._end()
        elif asks is not None:
            if asks == "stop":
                self.stop, self._term = True, now
            self._name, self.asked = signal.Signals(number).name, now
            self._request(asks)

    def _patience(self) -> float | None:
        asked = self.asked
        return None if asked is None else max(0.0, asked + LONG - time.monotonic())


def _leave_to_the_thread(number: int, frame: object) -> None:
    """Do nothing: Python writes to the pipe only for signals that have a handler."""
