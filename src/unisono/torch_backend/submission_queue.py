"""Collectives of a group, carried out one at a time in the order of submission.

    main thread          all_reduce (blocking), nothing under way ──▶ carried out in the same thread
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


class Submission(NamedTuple):
    """Collective that was submitted."""

    number: int
    name: str
    """PyTorch's name of the collective."""
    action: Callable[[], object]
    work: Work
    seconds: float
    """Timeout in seconds."""


class SubmissionQueue:
    """Queue of one group's collectives, which it carries out. `group` is the group's name in messages."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.running: Submission | None = None
        """Submission that is being carried out, if any."""
        self.deadline = Deadline(0)
        """Deadline of the running submission."""
        self.last_number = 0
        """Number of the last submission that was begun."""
        self.last_name = ""
        """Name of its collective."""
        self.failure = ""
        """Error that has ended this group for good; empty while there is none."""
        self.describe_missing: Callable[[int], str] = lambda _: ""
        """Function that describes the ranks that have not reached the collective of a number."""
        self.has_exited: Callable[[int], bool] = lambda _: False
        """Function that returns True if a rank has ended its program."""
        self._number = 0
        self._waiting = 0  # submissions that are not over
        self._queue: SimpleQueue[Submission | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._run_lock = threading.Lock()  # held while a submission is carried out
        self._thread: threading.Thread | None = None

    def submit(self, name: str, action: Callable[[], object], work: Work, seconds: float, blocking: bool) -> Work:
        """Carry `action` out and return `work`.

        A blocking one is carried out in this thread if nothing is under way; all others are queued.
        """
        with self._mutex:
            self._number += 1
            submission = Submission(self._number, name, action, work, seconds)
            here = blocking and self._waiting == 0
            self._waiting += 1
            if not here:
                self._queue.put(submission)
            else:
                self._run_lock.acquire()
            if not here and self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"unisono {self.group}", daemon=True)
                self._thread.start()
        if here:
            try:
                self._carry_out(submission)
            finally:
                self._run_lock.release()
        return work

    def describe(self, submission: Submission) -> str:
        """Return a description of a submission for messages."""
        return f"rank {self.rank} of {self.size}: {submission.name}, number {submission.number} of group {self.group}"

    def check(self) -> None:
        """Raise BackendError if the group has ended or the running collective has timed out."""
        if self.failure:
            raise BackendError(self.failure)
        submission = self.running
        if submission is not None and self.deadline.over:
            words = f"{self.describe(submission)}: Timed out after {submission.seconds:g} s"
            missing = self.describe_missing(submission.number)
            self.failure = f"{words}; {missing}" if missing else words
            raise BackendError(self.failure)

    def close(self) -> None:
        """End the communication thread once all submitted collectives are done."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.deadline.seconds if self._waiting else None)

    def _run(self) -> None:
        while (submission := self._queue.get()) is not None:
            with self._run_lock:
                self._carry_out(submission)
            del submission  # its tensors, which would live until the next one

    def _carry_out(self, submission: Submission) -> None:
        self.deadline = Deadline(submission.seconds)
        self.last_number, self.last_name = submission.number, submission.name
        self.running = submission
        error: BackendError | None = None
        try:
            if self.failure:
                self.check()
            submission.action()
        except BaseException as failure:  # any error must reach the callers that wait
            error = self._error_of(submission, failure)
            if not isinstance(failure, Exception):  # an interrupt ends the program, too
                raise
        finally:
            self.running = None
            with self._mutex:
                self._waiting -= 1
            submission.work.end(error)

    def _error_of(self, submission: Submission, failure: BaseException) -> BackendError:
        if isinstance(failure, BackendError) and failure.args == (self.failure,):
            return failure
        error = BackendError(f"{self.describe(submission)}: {str(failure) or repr(failure)}")
        error.__cause__ = failure
        return error
