"""Threads for one kind of work, and the queue of what they have to do: submit and forget (PCL-DNN section 4).

    submit ──▶ [ 9: exchange 1 │ 5: exchange 4 │ 5: exchange 5 ] ──▶ thread, thread        what is urgent goes first

With one thread, what is submitted with one priority is carried out in the order of submission.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue


class Pool:
    """`threads` threads that carry out what is submitted. The first submission starts them."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._size = threads
        self._queue: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._number = count()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, action: Callable[[], None], priority: int = 0) -> None:
        """Have `action`, which raises nothing, carried out soon; the higher its priority, the sooner."""
        self._queue.put((-priority, next(self._number), action))
        if not self._threads:
            self._start()

    def close(self) -> None:
        """End the threads, once all that was submitted is done."""
        with self._lock:  # who started them may still be at it, while what it submitted is done
            for _ in self._threads:
                self._queue.put((1 << 62, next(self._number), None))  # behind everything
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _start(self) -> None:
        with self._lock:
            if not self._threads:
                names = [f"unisono {self._name} {number}" for number in range(self._size)]
                self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
                for thread in self._threads:
                    thread.start()

    def _run(self) -> None:
        while (action := self._queue.get()[2]) is not None:
            action()
