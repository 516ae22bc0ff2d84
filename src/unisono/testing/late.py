"""Queues of works that run late, in an order that a seed chooses: what a device's streams do.

A work runs when somebody has to wait for it, or when the seed lets it: at each work that is put and at each question.
Works of a queue run in order; works of two queues in any order that the marks allow.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Mark:
    """Place in a queue that has been passed at `seconds` (None: not yet)."""

    queue: Queue
    seconds: float | None = None

    @property
    def passed(self) -> bool:
        return self.seconds is not None


@dataclass(eq=False)
class Queue:
    """Works of one stream, oldest first. A mark of this queue is passed, a mark of another one is waited for."""

    device: int
    works: deque[Callable[[], object] | Mark] = field(default_factory=deque)
    pace: float = 1.0

    @property
    def waits(self) -> Mark | None:
        """The mark that the oldest work waits for, if it does."""
        head = self.works[0]
        return head if isinstance(head, Mark) and head.queue is not self and not head.passed else None


class Late:
    """Scheduler of all queues: deterministic from its seed in one thread, and safe in several."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = False
        self._error: Exception | None = None
        self._busy: dict[Queue, None] = {}
        self.reseed(0)

    def reseed(self, seed: int) -> None:
        """Run what waits, then draw anew how eagerly works run."""
        with self._lock:
            for queue in list(self._busy):
                self._run_to(self._mark(queue))
            self._random = random.Random(seed)
            self._eagerness = self._random.choice((0.0, 0.4, 0.7, 0.9))

    def put(self, queue: Queue, work: Callable[[], object]) -> None:
        """Add a work to the queue; some works of any queues may run now."""
        with self._lock:
            self._add(queue, work)
            self._run_some()

    def mark(self, queue: Queue) -> Mark:
        """Return a mark behind all works of the queue."""
        with self._lock:
            mark = self._mark(queue)
            self._run_some()
            return mark

    def wait(self, queue: Queue, mark: Mark) -> None:
        """Let what is put into the queue from now on run after the mark is passed."""
        with self._lock:
            if mark.queue is not queue and not mark.passed:
                self._add(queue, mark)

    def ask(self, mark: Mark) -> bool:
        """Return whether the mark has been passed; some works may run now."""
        with self._lock:
            self._run_some()
            return mark.passed

    def run_to(self, mark: Mark) -> None:
        """Run what has to run before the mark; raise the error of a work that has failed anywhere, once."""
        with self._lock:
            self._run_to(mark)
            if self._error is not None:
                error, self._error = self._error, None
                raise RuntimeError(f"an operation that ran late failed: {error}") from error

    def run_device(self, device: int) -> None:
        """Run all works of the queues of a device; raise as `run_to` does."""
        with self._lock:
            for queue in [queue for queue in self._busy if queue.device == device]:
                self.run_to(self._mark(queue))

    def _mark(self, queue: Queue) -> Mark:
        if not queue.works:
            return Mark(queue, time.perf_counter())
        mark = Mark(queue)
        self._add(queue, mark)
        return mark

    def _add(self, queue: Queue, work: Callable[[], object] | Mark) -> None:
        if not queue.works:
            queue.pace = self._random.choice((1.0, 0.5, 0.02))
        queue.works.append(work)
        self._busy[queue] = None

    def _run_some(self) -> None:
        while not self._running and self._busy and self._random.random() < self._eagerness:
            queue = self._random.choice(list(self._busy))
            if self._random.random() < queue.pace and queue.waits is None:
                self._advance(queue)

    def _run_to(self, mark: Mark) -> None:
        needed = [mark]
        while needed:
            if needed[-1].passed:
                needed.pop()
            elif (other := needed[-1].queue.waits) is not None:
                needed.append(other)
            else:
                self._advance(needed[-1].queue)

    def _advance(self, queue: Queue) -> None:
        work = queue.works.popleft()
        if not queue.works:
            del self._busy[queue]
        if isinstance(work, Mark):
            if work.queue is queue:
                work.seconds = time.perf_counter()
            return
        self._running = True
        try:
            work()
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # as on a device, a later call learns of it
            self._error = error
        finally:
            self._running = False
