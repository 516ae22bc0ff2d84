"""Threads for one kind of work, and the queue of their actions: submit and forget (PCL-DNN section 4).

    submit ──▶ [ 9: exchange 1 │ 5: exchange 4 │ 5: exchange 5 ] ──▶ thread, thread        the highest priority first

With one thread, actions of equal priority are carried out in the order of submission.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue

Action = Callable[[], None]


class _Queue:
    """Queue of actions, the most urgent first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Action]] = []
        self._number = count()
        self._lock = threading.Lock()
        self._calls: SimpleQueue[bool] = SimpleQueue()  # True for each action; False ends a thread

    def put(self, action: Action, priority: int) -> None:
        with self._lock:
            heappush(self._heap, (-priority, next(self._number), action))
        self._calls.put(True)

    def end(self, threads: int) -> None:
        """End so many threads once all actions are done. Takes no lock: the garbage collector calls it anywhere."""
        for _ in range(threads):
            self._calls.put(False)

    def work(self) -> None:
        """Run actions until the thread has to end."""
        while self._calls.get():
            with self._lock:
                action = heappop(self._heap)[2]
            action()
            del action  # release the objects that it references


class ThreadPool:
    """Pool of `threads` threads that run submitted actions. The first submission starts them; they end with it."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._size = threads
        self._queue = _Queue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, action: Action, priority: int = 0) -> None:
        """Carry `action`, which must not raise, out on one of the threads; the higher its priority, the sooner."""
        self._queue.put(action, priority)
        if not self._threads:
            self._start()

    def close(self) -> None:
        """End the threads, once all submitted actions are done."""
        with self._lock:  # another thread may still be starting them, although its action is done
            self._queue.end(len(self._threads))
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
            threading.Thread(target=self._queue.work, name=f"unisono {self._name} {number}", daemon=True)
            for number in missing
        ]
        self._threads += added
        weakref.finalize(self, self._queue.end, len(added)).atexit = False
        for thread in added:
            thread.start()
