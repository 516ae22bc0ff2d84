"""Collectives of a group, carried out one at a time in the order of submission.

main thread          all_reduce (blocking), nothing under way ──▶ carried out in the same thread
                     all_reduce (async) ─┐
autograd's thread    all_reduce (async) ─┴▶ queue ──▶ communication thread, one after another
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from unisono.errors import BackendError
from unisono.torch_backend.work import Deadline, Work

Action = Callable[[], object]


class SubmissionQueue:
    """Queue of one group's collectives, which it carries out. `group` is the group's name in messages."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size
        self.running: Work | None = None
        """Collective that is being carried out, if any."""
        self.deadline = Deadline(0)
        """Its deadline."""
        self.last_number, self.last_name = 0, ""
        """Number and name of the last collective that was begun."""
        self.failure = ""
        """Error that has ended this group for good; empty while there is none."""
        self.describe_missing: Callable[[int], str] = lambda _: ""
        """Function that describes the ranks that have not reached the collective of a number."""
        self.has_exited: Callable[[int], bool] = lambda _: False
        """Function that returns True if a rank has ended its program."""
        self._number = 0
        self._waiting = 0  # collectives that are not over
        self._queue: SimpleQueue[tuple[Action, Work] | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._run_lock = threading.Lock()  # held while a collective is carried out
        self._thread: threading.Thread | None = None

    def submit(self, action: Action, work: Work, blocking: bool) -> Work:
        """Carry `action` out, and return its `work`.

        A blocking one is carried out in this thread if nothing is under way; all others are queued.
        """
        with self._mutex:
            self._number += 1
            work.number = self._number
            here = blocking and self._waiting == 0
            self._waiting += 1
            if here:
                self._run_lock.acquire()
            else:
                self._queue.put((action, work))
            if not here and self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"unisono {self.group}", daemon=True)
                self._thread.start()
        if here:
            try:
                self._carry_out(action, work)
            finally:
                self._run_lock.release()
        return work

    def describe(self, work: Work) -> str:
        """Return a description of a collective for messages."""
        return f"rank {self.rank} of {self.size}: {work.name}, number {work.number} of group {self.group}"

    def describe_timeout(self, work: Work) -> str:
        """Return the words for a collective that has timed out, with the ranks that are missing from it."""
        words = f"{self.describe(work)}: Timed out after {work.seconds:g} s"
        missing = self.describe_missing(work.number)
        return f"{words}; {missing}" if missing else words

    def check(self) -> None:
        """Raise BackendError if the group has ended or the running collective has timed out."""
        if not self.failure and self.running is not None and self.deadline.over:
            self.failure = self.describe_timeout(self.running)
        if self.failure:
            raise BackendError(self.failure)

    def close(self) -> None:
        """End the communication thread once all submitted collectives are done."""
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.deadline.seconds if self._waiting else None)

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            with self._run_lock:
                self._carry_out(*submitted)
            del submitted  # its tensors, which would live until the next one

    def _carry_out(self, action: Action, work: Work) -> None:
        self.deadline = Deadline(work.seconds)
        self.last_number, self.last_name = work.number, work.name
        self.running = work
        error: BackendError | None = None
        try:
            if self.failure:
                self.check()
            action()
        except BaseException as failure:  # any error must reach the callers that wait
            error = self._error_of(work, failure)
            if not isinstance(failure, Exception):  # an interrupt ends the program, too
                raise
        finally:
            self.running = None
            with self._mutex:
                self._waiting -= 1
            work.end(error)

    def _error_of(self, work: Work, failure: BaseException) -> BackendError:
        if isinstance(failure, BackendError) and failure.args == (self.failure,):
            return failure
        error = BackendError(f"{self.describe(work)}: {str(failure) or repr(failure)}")
        error.__cause__ = failure
        return error
