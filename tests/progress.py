"""Commands that end when they make no progress: nothing written for a while. The total time has no limit."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

SILENCE_SECONDS = 120.0
"""Seconds without output after which a command counts as hanging.

Output is the sign, not CPU time: ranks poll while they wait, so that a hang uses as much of a core as a computation.
"""

POLL_SECONDS = 0.01
"""Seconds between two polls of a state that changes without output."""

MAX_SHOWN_CHARACTERS = 6000
"""Characters of each stream that a failure shows."""

Result = TypeVar("Result")

Run = Callable[..., subprocess.CompletedProcess[str]]
"""Type of the fixtures that run a command."""


class NoProgressError(AssertionError):
    """A command that was ended because it wrote nothing for too long."""


class Watched:
    """A running command, in a session of its own, whose output is read in waits.

    Each wait fails, and ends the command and all that it started, after `timeout` seconds without output.
    """

    def __init__(
        self,
        command: Sequence[str],
        timeout: float = SILENCE_SECONDS,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._timeout = list(command), timeout
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, cwd=cwd, env=env
        )
        self._selector = selectors.DefaultSelector()
        self._written = {"stdout": bytearray(), "stderr": bytearray()}
        for name in self._written:
            self._selector.register(getattr(self.process, name), selectors.EVENT_READ, name)
        self._last_output = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        self._selector.close()
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()

    @property
    def stdout(self) -> str:
        """Output so far."""
        return self._written["stdout"].decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Errors so far."""
        return self._written["stderr"].decode(errors="replace")

    def until(self, condition: Callable[[], bool]) -> None:
        """Read output until the condition holds. The command must not end before."""
        while not condition():
            ended = self.process.poll() is not None
            self._read(POLL_SECONDS)
            assert not ended, f"the command ended by itself\n{self._tail()}"

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Read on until the command has ended and nothing that it started can write any more."""
        while self._selector.get_map():
            self._read(self._timeout)
        try:
            self.process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            self._fail()
        return subprocess.CompletedProcess(self._command, self.process.returncode, self.stdout, self.stderr)

    def kill(self) -> None:
        """End the command and all that it started."""
        for pid in process_tree(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _read(self, seconds: float) -> None:
        """Wait at most `seconds` for output, and read it."""
        left = self._last_output + self._timeout - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(seconds, left))):
            if chunk := os.read(key.fd, 1 << 16):
                self._written[key.data] += chunk
                self._last_output = time.monotonic()
            else:
                self._selector.unregister(key.fileobj)
        if time.monotonic() - self._last_output >= self._timeout:
            self._fail()

    def _fail(self) -> None:
        self.kill()
        raise NoProgressError(f"{' '.join(self._command)} wrote nothing for {self._timeout} s\n{self._tail()}")

    def _tail(self) -> str:
        return f"{self.stdout[-MAX_SHOWN_CHARACTERS:]}\n{self.stderr[-MAX_SHOWN_CHARACTERS:]}"


def run(
    command: Sequence[str],
    timeout: float = SILENCE_SECONDS,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; it fails after `timeout` seconds without output."""
    with Watched(command, timeout, cwd, env) as watched:
        return watched.finish()


def poll_until(poll: Callable[[], Result], done: Callable[[Result], bool], timeout: float = SILENCE_SECONDS) -> Result:
    """Poll until the result is done, or has not changed for `timeout` seconds; return the last result."""
    result, changed = poll(), time.monotonic()
    while not done(result) and time.monotonic() - changed < timeout:
        time.sleep(POLL_SECONDS)
        before, result = result, poll()
        if result != before:
            changed = time.monotonic()
    return result


def process_tree(pid: int) -> list[int]:
    """Return a session leader, all others of its session, and all processes that any of them started elsewhere."""
    parents: dict[int, int] = {}
    pids = {pid}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            _, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            parents[int(path.parent.name)] = int(parent)
            pids |= {int(path.parent.name)} if int(session) == pid else set()
    while more := {child for child, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return sorted(pids)
