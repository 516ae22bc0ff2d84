"""Requests of a checkpoint, by signals and by time: SIGUSR1 saves at the end of the step, SIGTERM saves and ends.

    kill -TERM ─▶ wake-up pipe ─▶ a thread ─▶ request("stop") ─▶ control message of the step ─▶ all ranks save, exit 143

A thread reads them, since Python's own handlers run only when the main thread returns from native code. They may be
sent to any one rank: the other ranks get the request in the next step.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Literal, Self

Request = Literal["save", "stop"]

REQUESTS: dict[int, Request] = {signal.SIGUSR1: "save", signal.SIGTERM: "stop"}

STOPPED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, as shells define it."""

REPEAT_SECONDS = 1.0
"""Seconds within which SIGTERMs count as one: a batch system, `timeout` and the launcher may each forward it."""

SLOW_STEP_SECONDS = 30.0
"""Seconds after which a warning is printed about a step that has not ended."""


def meaning(signum: int, since_term: float | None) -> Request | Literal["end"] | None:
    """Return the meaning of a signal. `since_term` is the seconds since the first SIGTERM; None: there was none."""
    if signum == signal.SIGTERM and since_term is not None:
        return "end" if since_term >= REPEAT_SECONDS else None
    return REQUESTS.get(signum)


class Timer:
    """Says once in so many seconds that they are over; never for 0."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        self._last = time.monotonic()

    def due(self) -> bool:
        """Return True where the seconds are over, and count them anew."""
        if not self._seconds or time.monotonic() - self._last < self._seconds:
            return False
        self.restart()
        return True


class SignalHandlers:
    """Within the block, signals to this process call `request`, or `end` for a second SIGTERM; others than `numbers`
    keep their handlers.

    `warn` is called with a line when a step takes long after a signal. Off the main thread, where Python has no
    signals, nothing is changed.
    """

    def __init__(
        self,
        request: Callable[[Request], None],
        end: Callable[[], None],
        warn: Callable[[str], None],
        numbers: Collection[int] = tuple(REQUESTS),
    ) -> None:
        self._request, self._end, self._warn, self._numbers = request, end, warn, numbers
        self.stop = False
        """True once this rank has received SIGTERM."""
        self.saved = False
        """To be set once the run is saved for its end: a SIGTERM that comes later to this rank asks for the same."""
        self.pending_since: float | None = None
        """Time of the last signal whose checkpoint is not written yet, by `time.monotonic`; None: there is none."""
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
        # Python writes to the pipe only for signals that have a handler
        self._before = {signum: signal.signal(signum, lambda *_: None) for signum in self._numbers}
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            return
        if self.saved:
            self._before[signal.SIGTERM] = signal.SIG_IGN
        for signum, before in self._before.items():
            signal.signal(signum, before)  # type: ignore[arg-type]  # as `signal` gave it
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)
        self._thread = None

    def _listen(self) -> None:
        while True:
            since = self.pending_since
            timeout = None if since is None else max(0.0, since + SLOW_STEP_SECONDS - time.monotonic())
            numbers = os.read(self._reader, 64) if select.select([self._reader], [], [], timeout)[0] else b""
            if 0 in numbers:
                return
            for signum in numbers:
                if signum in self._numbers:
                    self._handle(signum)
            if not numbers and self.pending_since is not None:
                self._warn(
                    f"{self._name} was received {SLOW_STEP_SECONDS:.0f} s ago, and no checkpoint is written yet: it "
                    "is at the end of the step, or at the rule's next exchange (a second SIGTERM ends the run at once, "
                    "without one)"
                )
                self.pending_since = None

    def _handle(self, signum: int) -> None:
        now = time.monotonic()
        requested = meaning(signum, None if self._term is None else now - self._term)
        if requested == "end":
            self._end()
        elif requested is not None:
            if requested == "stop":
                self.stop, self._term = True, now
            self._name, self.pending_since = signal.Signals(signum).name, now
            self._request(requested)
