"""Detection of ranks that are missing from a collective or have left, through the store that PyTorch's ranks share.

    rank 0   in all_reduce, number 7 ... waits      store:  0/group = 7 all_reduce     1/group = 6 broadcast
    rank 1   computes, or is stuck elsewhere                                            ▲ has not reached number 7

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
from unisono.torch_backend.submission_queue import SubmissionQueue
from unisono.torch_backend.work import Work

POLL_INTERVAL_SECONDS = 1.0
"""Seconds between two polls."""

GRACE_SECONDS = 3.0
"""Seconds within which a wait has to raise its error itself."""

LEFT = "left"


class Watchdog:
    """Watchdog of the submission queues of a process."""

    def __init__(self) -> None:
        self._states: dict[SubmissionQueue, _GroupState] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        atexit.register(self.publish_exit)

    def watch(self, queue: SubmissionQueue, store: Any) -> None:
        """Watch a queue; `store` is shared by the ranks of its group alone, and no other thread blocks in it."""
        state = _GroupState(queue, store)
        queue.describe_missing, queue.has_exited = state.describe_missing, state.has_exited
        with self._lock:
            self._states[queue] = state
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unisono watchdog", daemon=True)
                self._thread.start()

    def unwatch(self, queue: SubmissionQueue) -> None:
        """Stop watching a queue that all its ranks have ended."""
        with self._lock:
            self._states.pop(queue, None)

    def publish_exit(self) -> None:
        """Publish at the end of the program that this rank has exited: ranks that wait for it then fail."""
        with self._lock:
            states = list(self._states.values())
            self._states.clear()
        for state in states:
            state.publish_exit()

    def _run(self) -> None:
        waiting = threading.Event()
        while not waiting.wait(POLL_INTERVAL_SECONDS):
            with self._lock:
                states = list(self._states.values())
            for state in states:
                state.poll()


class _GroupState:
    """State that the ranks of one group publish."""

    def __init__(self, queue: SubmissionQueue, store: Any) -> None:
        self._queue, self._store = queue, store
        self._last_polled = 0  # number of the last collective at the previous poll
        self._published = 0
        self._overdue_seconds = 0.0  # seconds since the running collective should have raised its error

    def poll(self) -> None:
        """Publish this rank's position, once, and end its wait if a rank that it needs has exited."""
        queue = self._queue
        running, begun = queue.running, queue.last_number
        if begun != self._last_polled:
            self._last_polled, self._overdue_seconds = begun, 0.0
            return
        with suppress(RuntimeError):  # the host of the store has exited: MPI reports that
            if begun != self._published:
                self._store.set(str(queue.rank), f"{begun} {queue.last_name}")
                self._published = begun
            if running is not None and not queue.failure and self._store.check([LEFT]):
                self._find_exited_rank(running)
        if running is not None and (queue.failure or queue.deadline.over):
            self._overdue_seconds += POLL_INTERVAL_SECONDS
            if self._overdue_seconds > GRACE_SECONDS and queue.running is running:
                self._end_all(running)

    def publish_exit(self) -> None:
        """Publish that this rank has ended its program."""
        queue = self._queue
        with suppress(RuntimeError):
            self._store.set(str(queue.rank), f"{queue.last_number} {queue.last_name}".rstrip() + f" {LEFT}")
            self._store.add(LEFT, 1)

    def describe_missing(self, number: int) -> str:
        """Return a description of the ranks that have not reached that collective, with the last one of each."""
        with suppress(RuntimeError):
            self._store.set(str(self._queue.rank), f"{number} {self._queue.last_name}")
        time.sleep(POLL_INTERVAL_SECONDS * 1.5)  # ranks that have reached it may not have published that yet
        found = [f"rank {rank} ({where})" for rank, begun, where in self._others() if begun < number]
        return f"missing: {', '.join(found)}" if found else ""

    def has_exited(self, rank: int) -> bool:
        """Return True if a rank has ended its program."""
        with suppress(RuntimeError):
            return self._store.check([LEFT]) and self._read(rank)[1].endswith(LEFT)
        return False

    def _find_exited_rank(self, running: Work) -> None:
        for rank, begun, where in self._others():
            if begun < running.number and where.endswith(LEFT):
                self._queue.failure = f"{self._queue.describe(running)}: rank {rank} has ended its program ({where})"
                return

    def _others(self) -> list[tuple[int, int, str]]:
        """Return for each other rank its number, the number of its last collective, and a description of it."""
        found = []
        with suppress(RuntimeError):
            for rank in range(self._queue.size):
                if rank != self._queue.rank:
                    found.append((rank, *self._read(rank)))
        return found

    def _read(self, rank: int) -> tuple[int, str]:
        if not self._store.check([str(rank)]):
            return 0, "not seen yet"
        begun, _, name = self._store.get(str(rank)).decode().partition(" ")
        exited = f", then {LEFT}" if name.endswith(LEFT) else ""
        name = name.removesuffix(LEFT).strip()
        return int(begun), f"last in {name}, number {begun}{exited}" if name else f"in none yet{exited}"

    def _end_all(self, running: Work) -> None:
        """Print the error and exit, where the wait cannot be ended from outside; the launcher ends the other ranks."""
        words = self._queue.failure or self._queue.describe_timeout(running)
        witness.report_abort(f"unisono.errors.BackendError: {words}\n")
        os._exit(1)
