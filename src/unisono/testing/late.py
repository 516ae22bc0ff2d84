"""Queues of works that run late, in an order that a seed chooses: what a device's streams do.

A work runs when somebody has to wait for it, or when the seed lets it: at each work that is put and at each question.
Works of a queue run in order; works of two queues in any order that the points allow. Each computes with one thread of
PyTorch, whichever thread runs it: products depend on the number.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False, slots=True)
class Point:
    """Point in a queue that has been passed at `seconds` (None: not yet)."""

    queue: Queue
    seconds: float | None = None

    @property
    def passed(self) -> bool:
        return self.seconds is not None


@dataclass(eq=False)
class Queue:
    """Works of one stream, oldest first. A point of this queue is passed, a point of another one is waited for."""

    device: int
    works: deque[Callable[[], object] | Point] = field(default_factory=deque)

    @property
    def waits(self) -> Point | None:
        """The point that the oldest work waits for, if it does."""
        head = self.works[0]
        return head if isinstance(head, Point) and head.queue is not self and not head.passed else None


class Late:
    """Scheduler of all queues: deterministic from its seed in one thread, and safe in several."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running = False
        self._error: Exception | None = None
        self._busy: dict[Queue, None] = {}
        self._random, self._eagerness, self._paces = random.Random(0), 0.0, dict[Queue, float]()

    def reseed(self, seed: int | None) -> None:
        """Run what waits, then draw anew how eagerly works run (None: only for who waits) and which queues are slow."""
        with self._lock:
            for queue in list(self._busy):
                self.run_to(self.point(queue))
            self._random, self._paces = random.Random(seed), {}
            self._eagerness = 0.0 if seed is None else self._random.choice((0.0, 0.7, 0.95))

    def put(self, queue: Queue, work: Callable[[], object] | Point) -> None:
        """Add a work to the queue, or a point that it waits for; some works of any queues may run now."""
        with self._lock:
            if isinstance(work, Point) and (work.passed or (work.queue is queue and not queue.works)):
                work.seconds = work.seconds or time.perf_counter()
                return
            self._paces.setdefault(queue, self._random.choice((1.0, 0.02)))
            queue.works.append(work)
            self._busy[queue] = None
            self._run_some()

    def point(self, queue: Queue) -> Point:
        """Return a point behind all works of the queue."""
        point = Point(queue)
        self.put(queue, point)
        return point

    def ask(self, point: Point) -> bool:
        """Return whether the point has been passed; some works run now, so that who asks again and again gets there."""
        with self._lock:
            self._run_some()
            passed = point.passed
            if not passed:
                self._step_to(point)
            return passed

    def run_to(self, point: Point) -> None:
        """Run what has to run before the point; raise the error of a work that has failed anywhere, once."""
        with self._lock:
            while not point.passed:
                self._step_to(point)
                self._run_some()
            if self._error is not None:
                error, self._error = self._error, None
                raise RuntimeError(f"an operation that ran late failed: {error}") from error

    def run_device(self, device: int) -> None:
        """Run all works of the queues of a device; raise as `run_to` does."""
        with self._lock:
            for queue in [queue for queue in self._busy if queue.device == device]:
                self.run_to(self.point(queue))

    def _run_some(self) -> None:
        while not self._running and self._busy and self._random.random() < self._eagerness:
            queue = self._random.choice(list(self._busy))
            if self._random.random() < self._paces[queue] and queue.waits is None:
                self._advance(queue)

    def _step_to(self, point: Point) -> None:
        while (awaited := point.queue.waits) is not None:
            point = awaited
        self._advance(point.queue)

    def _advance(self, queue: Queue) -> None:
        work = queue.works.popleft()
        if not queue.works:
            del self._busy[queue]
        if isinstance(work, Point):
            work.seconds = work.seconds or time.perf_counter()
            return
        self._running = True
        if torch.get_num_threads() > 1:  # each thread has a number of its own, and any thread may run this
            torch.set_num_threads(1)
        try:
            work()
        except (RuntimeError, IndexError, ValueError, TypeError) as error:  # as on a device, a later call learns of it
            self._error = error
        finally:
            self._running = False
