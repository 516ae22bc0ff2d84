"""Collectives of a group, carried out one at a time in the order of submission.

main thread          all_reduce (blocking), nothing under way ──▶ carried out in the same thread
                     all_reduce (async) ─┐
autograd's thread    all_reduce (async) ─┴▶ queue ──▶ communication thread, one after another
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from unisono.collectives.calls import Calls
from unisono.errors import BackendError, StallError
from unisono.torch_backend.work import Work

Action = Callable[[], object]


class SubmissionQueue:
    """Queue of one group's collectives, which it carries out. `group` is the group's name in messages.

    The watch ends `calls`, those of the group, after the time-out of the collective that is carried out.
    """

    def __init__(self, group: str, rank: int, size: int, calls: Calls) -> None:
        self.group, self.rank, self.size, self.calls = group, rank, size, calls
        self.ended = ""
        """Error of collectives after the end of the group; empty before it."""
        self._closed = False  # the thread carries out what is queued, and nothing more
        self._number = 0
        self._waiting = 0  # collectives that are not over
        self._queue: SimpleQueue[tuple[Action, Work] | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._run_lock = threading.Lock()  # held while a collective is carried out
        self._thread: threading.Thread | None = None

    def submit(self, action: Action, work: Work, blocking: bool) -> Work:
        """Carry `action` out, and return its `work`.

        A blocking one is carried out in this thread if nothing is under way; all others are queued, and fail after
        `close`.
        """
        with self._mutex:
            self._number += 1
            work.number = self._number
            here = blocking and self._waiting == 0
            refused = self._closed and not here
            self._waiting += not refused
            if here:
                self._run_lock.acquire()
            elif not refused:
                self._queue.put((action, work))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=f"unisono {self.group}", daemon=True)
                    self._thread.start()
        if here:
            try:
                self._carry_out(action, work)
            finally:
                self._run_lock.release()
        elif refused:
            work.end(BackendError(self.failure or f"{self.describe(work)}: the group ends; submit it before that"))
        return work

    def describe(self, work: Work) -> str:
        """Return a description of a collective for messages."""
        return f"rank {self.rank} of {self.size}: {work.name}, number {work.number} of group {self.group}"

    @property
    def failure(self) -> str:
        """Error that has ended this group for good; empty while there is none."""
        return self.calls.failure[1] if self.calls.failure is not None else self.ended

    def close(self, seconds: float | None = None) -> None:
        """End the communication thread once all submitted collectives are done; wait for `seconds` at most, or as long
        as a collective may take."""
        with self._mutex:
            self._closed = True
            self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds or (self.calls.timeout if self._waiting else None))

    def _run(self) -> None:
        while (submitted := self._queue.get()) is not None:
            with self._run_lock:
                self._carry_out(*submitted)
            del submitted  # its tensors, which would live until the next one

    def _carry_out(self, action: Action, work: Work) -> None:
        self.calls.timeout = work.seconds
        error = BackendError(self.ended) if self.ended else None
        try:
            if error is None:
                action()
        except BaseException as failure:  # any error must reach the callers that wait
            error = self._error_of(work, failure)
            if not isinstance(failure, Exception):  # an interrupt ends the program, too
                raise
        finally:
            with self._mutex:
                self._waiting -= 1
            work.end(error)

    def _error_of(self, work: Work, failure: BaseException) -> BackendError:
        if isinstance(failure, BackendError) and failure.args == (self.failure,):
            return failure
        error = BackendError(f"{self.describe(work)}: {str(failure) or repr(failure)}")
        error.__cause__ = failure
        if isinstance(failure, StallError):
            self.calls.failure = BackendError, str(error)
        return error
