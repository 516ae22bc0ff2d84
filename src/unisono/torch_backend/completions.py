"""Threads that complete futures, so that no callback runs on a communication thread.

A callback may start a collective and wait for its future, which another thread must complete:

    thread 1    completes A ── A's callback starts B and waits for it ──────────────┐ continues
    thread 2                                                   completes B ─────────┘

So one thread is always free: when all are busy, another one is started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Completions:
    """Threads of their own that run submitted functions, in order of submission."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0  # threads that are not busy, less what is waiting for them

    def submit(self, complete: Callable[[], None]) -> None:
        """Run `complete` soon, on one of the threads."""
        with self._lock:
            self._free -= 1
            short = self._free < 0
            if short:
                self._free += 1
        self._queue.put(complete)
        if short:
            threading.Thread(target=self._run, name="unisono completions", daemon=True).start()

    def _run(self) -> None:
        while True:
            complete = self._queue.get()
            complete()
            with self._lock:
                self._free += 1
