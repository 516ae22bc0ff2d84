"""Detection of ranks that are missing from a collective or have left, through the store that PyTorch's ranks share.

    rank 0   in all_reduce, number 7 ... waits      store:  0/group = 7 all_reduce     1/group = 6 broadcast
    rank 1   computes, or is stuck elsewhere                                            ▲ has not come to number 7

A thread polls every second. If a group's last collective is the same as a second ago, it is published once; a group
that proceeds from collective to collective costs nothing. A rank that ends its program publishes that as well. A
waiting rank raises if a rank that it needs has left. Where it is blocked inside the MPI library and cannot raise, it
prints the error and ends the job with all ranks.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from contextlib import suppress
from typing import Any

from unisono import witness
from unisono.torch_backend.line import Line, Task

LOOK = 1.0
"""Seconds between two polls."""

GRACE = 3.0
"""Seconds that a wait has to raise its error itself."""

LEFT = "left"


class Watchdog:
    """Watchdog of the lines of a process."""

    def __init__(self) -> None:
        self._boards: dict[Line, _Board] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        atexit.register(self.leave)

    def watch(self, line: Line, store: Any) -> None:
        """Watch a line; `store` is shared by the ranks of its group alone, and nobody else waits in it."""
        board = _Board(line, store)
        line.absent, line.gone = board.absent, board.gone
        with self._lock:
            self._boards[line] = board
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unisono watchdog", daemon=True)
                self._thread.start()

    def forget(self, line: Line) -> None:
        """Stop watching a line that all its ranks have ended."""
        with self._lock:
            self._boards.pop(line, None)

    def leave(self) -> None:
        """Publish at the end of the program that this rank has left: ranks that wait for it wait in vain."""
        with self._lock:
            boards = list(self._boards.values())
            self._boards.clear()
        for board in boards:
            board.leave()

    def _run(self) -> None:
        waiting = threading.Event()
        while not waiting.wait(LOOK):
            with self._lock:
                boards = list(self._boards.values())
            for board in boards:
                board.look()


class _Board:
    """State that the ranks of one group publish."""

    def __init__(self, line: Line, store: Any) -> None:
        self._line, self._store = line, store
        self._seen = 0  # what the line had begun at the last look
        self._written = 0
        self._late = 0.0  # seconds that the stuck task has had an error coming

    def look(self) -> None:
        """Publish this rank's position, once, and end its wait if the wait is in vain."""
        line = self._line
        task, begun = line.current, line.begun
        if begun != self._seen:
            self._seen, self._late = begun, 0.0
            return
        with suppress(RuntimeError):  # a store whose host has gone: MPI will tell
            if begun != self._written:
                self._store.set(str(line.rank), f"{begun} {line.last}")
                self._written = begun
            if task is not None and not line.verdict and self._store.check([LEFT]):
                self._find_culprit(task)
        if task is not None and (line.verdict or line.deadline.over):
            self._late += LOOK
            if self._late > GRACE and line.current is task:
                self._end_all(task)

    def leave(self) -> None:
        """Publish that this rank has ended its program."""
        line = self._line
        with suppress(RuntimeError):
            self._store.set(str(line.rank), f"{line.begun} {line.last}".rstrip() + f" {LEFT}")
            self._store.add(LEFT, 1)

    def absent(self, number: int) -> str:
        """Return in words which ranks have not reached the collective of that number, and where they were last."""
        with suppress(RuntimeError):
            self._store.set(str(self._line.rank), f"{number} {self._line.last}")
        time.sleep(LOOK * 1.5)  # those who have come may not have had the time to write it down
        found = [f"rank {rank} ({where})" for rank, begun, where in self._others() if begun < number]
        return f"not come: {', '.join(found)}" if found else ""

    def gone(self, rank: int) -> bool:
        """Return True if a rank has ended its program."""
        with suppress(RuntimeError):
            return self._store.check([LEFT]) and self._read(rank)[1].endswith(LEFT)
        return False

    def _find_culprit(self, task: Task) -> None:
        for rank, begun, where in self._others():
            if begun < task.number and where.endswith(LEFT):
                self._line.verdict = f"{self._line.describe(task)}: rank {rank} has ended its program ({where})"
                return

    def _others(self) -> list[tuple[int, int, str]]:
        """Return for each other rank its number, the number of its last collective, and its position in words."""
        found = []
        with suppress(RuntimeError):
            for rank in range(self._line.size):
                if rank != self._line.rank:
                    found.append((rank, *self._read(rank)))
        return found

    def _read(self, rank: int) -> tuple[int, str]:
        if not self._store.check([str(rank)]):
            return 0, "not seen yet"
        begun, _, name = self._store.get(str(rank)).decode().partition(" ")
        gone = f", then {LEFT}" if name.endswith(LEFT) else ""
        name = name.removesuffix(LEFT).strip()
        return int(begun), f"last in {name}, number {begun}{gone}" if name else f"in none yet{gone}"

    def _end_all(self, task: Task) -> None:
        """Print the error and exit, where the wait cannot be ended from outside; the launcher ends the other ranks."""
        line = self._line
        absent = self.absent(task.number)
        late = f"Timed out after {task.seconds:g} s" + (f"; {absent}" if absent else "")
        words = line.verdict or f"{line.describe(task)}: {late}"
        witness.last_words(f"unisono.errors.BackendError: {words}\n")
        os._exit(1)
