"""Signals that a sweep receives, passed on to its running run.

signal to the sweep         signal to the run      effect
SIGTERM, SIGINT, SIGHUP     SIGTERM                the run saves a checkpoint and ends; no other run is started
SIGUSR1                     SIGUSR1                the run saves a checkpoint and continues

The run has a process group of its own. So Ctrl-C in a terminal reaches the sweep only, and the run is saved.
"""

from __future__ import annotations

import signal
import subprocess
from types import FrameType, TracebackType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Signal handlers within a block; signals that were ignored before, as by nohup, stay ignored."""

    def __init__(self) -> None:
        self.received: int | None = None
        """First signal that requested the end of the sweep; None before."""
        self._process: subprocess.Popen[bytes] | None = None
        self._earlier: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (*STOPPING, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._earlier[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal has returned it

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a run to end. Return its exit code, 128 + N where signal N has ended it."""
        self._process = process
        if self.received is not None:  # before the process was known
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in STOPPING and self.received is None:
            self.received = number
        if self._process is not None:  # SIGINT would end a run without a checkpoint
            self._process.send_signal(signal.SIGTERM if number in STOPPING else number)
