"""Threads for one kind of work, and the queue of their actions: submit and forget (PCL-DNN section 4).

submit ──▶ [ exchange 1 │ exchange 4 │ exchange 5 ] ──▶ thread, thread        in the order of submission
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Action = Callable[[], None]


def _work(queue: SimpleQueue[Action | None]) -> None:
    """Run actions until None comes: the thread has to end."""
    while (action := queue.get()) is not None:
        action()
        del action  # release the objects that it references


def _end(queue: SimpleQueue[Action | None], threads: int) -> None:
    """End so many threads once all actions are done. Takes no lock: the garbage collector calls it anywhere."""
    for _ in range(threads):
        queue.put(None)


class ThreadPool:
    """Pool of `threads` threads that run submitted actions. The first submission starts them; they end with it."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._size = threads
        self._queue: SimpleQueue[Action | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, action: Action) -> None:
        """Carry `action`, which must not raise, out on one of the threads."""
        self._queue.put(action)
        if not self._threads:
            self._start()

    def close(self) -> None:
        """End the threads, once all submitted actions are done."""
        with self._lock:  # another thread may still be starting them, although its action is done
            _end(self._queue, len(self._threads))
            for thread in self._threads:
                thread.join()
            self._threads = []

    def grow(self, threads: int) -> None:
        """Provide at least `threads` threads."""
        with self._lock:
            self._size = max(self._size, threads)
            if self._threads:
                self._add()

    def _start(self) -> None:
        with self._lock:
            if not self._threads:
                self._add()

    def _add(self) -> None:
        """Start the missing threads. Called with the lock held."""
        missing = range(len(self._threads), self._size)
        added = [
            threading.Thread(target=_work, args=(self._queue,), name=f"unisono {self._name} {number}", daemon=True)
            for number in missing
        ]
        self._threads += added
        weakref.finalize(self, _end, self._queue, len(added)).atexit = False
        for thread in added:
            thread.start()
