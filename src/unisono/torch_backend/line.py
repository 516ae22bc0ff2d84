"""Collectives of a group, carried out one at a time in the order of submission.

    main thread          all_reduce (blocking), nothing under way ──▶ carried out right here: no thread is changed
                         all_reduce (async) ─┐
    autograd's thread    all_reduce (async) ─┴▶ queue ──▶ communication thread, one after another

Each collective has a number, the same on all ranks as long as they make the same calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from unisono.errors import BackendError
from unisono.torch_backend.work import Deadline, Work


class Task(NamedTuple):
    """Collective to be carried out."""

    number: int
    name: str
    """PyTorch's name of the collective."""
    action: Callable[[], object]
    work: Work
    seconds: float
    """Timeout in seconds."""


class Line:
    """Queue of one group's collectives, which it carries out. `group` is the group's name in messages."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.current: Task | None = None
        """Task that is being carried out, if any."""
        self.deadline = Deadline(0)
        """Deadline of the current task."""
        self.begun = 0
        """Number of the last task that was begun."""
        self.last = ""
        """Name of that task."""
        self.verdict = ""
        """Error that has ended this group for good; empty while there is none."""
        self.absent: Callable[[int], str] = lambda _: ""
        """Function that names the ranks that have not reached the collective of a number, in words."""
        self.gone: Callable[[int], bool] = lambda _: False
        """Function that returns True if a rank has ended its program."""
        self._number = 0
        self._waiting = 0  # tasks that are not over
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._turn = threading.Lock()  # held while a task is carried out
        self._thread: threading.Thread | None = None

    def submit(self, name: str, action: Callable[[], object], work: Work, seconds: float, blocking: bool) -> Work:
        """Carry `action` out and return `work`.

        A blocking one is carried out in this thread if nothing is under way; all others are queued.
        """
        with self._mutex:
            self._number += 1
            task = Task(self._number, name, action, work, seconds)
            here = blocking and self._waiting == 0
            self._waiting += 1
            if not here:
                self._queue.put(task)
            else:
                self._turn.acquire()
            if not here and self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"unisono {self.group}", daemon=True)
                self._thread.start()
        if here:
            try:
                self._carry_out(task)
            finally:
                self._turn.release()
        return work

    def describe(self, task: Task) -> str:
        """Return a description of a task for messages."""
        return f"rank {self.rank} of {self.size}: {task.name}, number {task.number} of group {self.group}"

    def check(self) -> None:
        """Raise BackendError if the group has ended or the current collective has timed out."""
        if self.verdict:
            raise BackendError(self.verdict)
        task = self.current
        if task is not None and self.deadline.over:
            words = f"{self.describe(task)}: Timed out after {task.seconds:g} s"
            absent = self.absent(task.number)
            self.verdict = f"{words}; {absent}" if absent else words
            raise BackendError(self.verdict)

    def close(self) -> None:
        """End the communication thread once the submitted tasks are done."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.deadline.seconds if self._waiting else None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            with self._turn:
                self._carry_out(task)

    def _carry_out(self, task: Task) -> None:
        self.deadline = Deadline(task.seconds)
        self.begun, self.last = task.number, task.name
        self.current = task
        error: BackendError | None = None
        try:
            if self.verdict:
                self.check()
            task.action()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the one who waits must hear it
            error = self._failed(task, failure)
        finally:
            self.current = None
            with self._mutex:
                self._waiting -= 1
            task.work.end(error)

    def _failed(self, task: Task, failure: Exception) -> BackendError:
        if isinstance(failure, BackendError) and failure.args == (self.verdict,):
            return failure
        error = BackendError(f"{self.describe(task)}: {failure}")
        error.__cause__ = failure
        return error
