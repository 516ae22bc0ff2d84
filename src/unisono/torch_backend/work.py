"""Collectives of a group, carried out one at a time in the order of submission; the handle of an operation under way,
and the threads that complete its future.

    main thread          all_reduce (blocking), nothing under way ──▶ carried out in the same thread
                         all_reduce (async) ─┐
    autograd's thread    all_reduce (async) ─┴▶ queue ──▶ communication thread, one after another

An error must reach every caller, in whatever way it waits. A Future of PyTorch that was given an exception loses it in
C++, where DistributedDataParallel waits. So the future always succeeds, and callers get a second one:

    communication thread ── error kept, event set ──▶ wait() raises
                         ── completions ──▶ future.set_result ──▶ then: raises the error  ◀── get_future()

No callback runs on a communication thread. It may start an operation and wait for its future, which another thread
must complete: so one thread of the completions is always free.

    thread 1    completes A ── A's callback starts B and waits for it ──────────────┐ continues
    thread 2                                                   completes B ─────────┘

Tensors of a device are filled on a stream of the thread that carries the operation out, behind the stream of the thread
that has called it. `wait` lets the waiting thread's stream wait for the end of that, futures wait themselves.

PyTorch's profiler shows an operation as `unisono:all_reduce`, with the shapes of its inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from unisono.collectives.states import Calls
from unisono.device import CopyStreams, is_on_host, streams_of
from unisono.errors import BackendError, StallError
from unisono.torch_backend.pytorch import WorkBase

NO_TIMEOUT = timedelta()


class Work(WorkBase):  # type: ignore[misc]  # untyped
    """Handle that every operation returns.

    `name` is the operation, `result` the value of its future, `seconds` its timeout, and `event` the profiler's, if one
    is active.
    """

    number = 0
    """Number of a collective among those of its group, the same on all ranks that make the same calls."""

    def __init__(
        self, name: str, result: Any, seconds: float, completions: Completions, event: Event | None = None
    ) -> None:
        super().__init__()
        self.name, self.seconds = name, seconds
        self._result = result
        self._completions = completions
        self._profiled = event
        self._error: BackendError | None = None
        self._ended = False
        self._event: threading.Event | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()
        self._streams: CopyStreams | None = None  # of the device on which the tensors are, with the end of the action
        self._filled: Any = None

    def behind_stream(self, action: Callable[[], object], tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
        """Return an action that follows what this thread has computed on the device of `tensors`, and comes before what
        a thread computes there that has waited for this work."""
        on_device = [tensor for tensor in tensors if not is_on_host(tensor) and tensor.layout is torch.strided]
        if not on_device:  # none has memory of a device: refused, or sparse
            return action
        streams = self._streams = streams_of(on_device[0].device)
        computed = streams.record()

        def act() -> None:
            with streams.apart(computed) as stream:
                for tensor in on_device:  # by its memory: a lazy negative cannot be recorded
                    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                    alias.set_(tensor.untyped_storage()).record_stream(stream)
                action()
                self._filled = streams.record()

        return act

    def end(self, error: BackendError | None = None) -> None:
        """Mark the operation as over, with its error if it failed. Called once, by the thread that carried it out."""
        if self._profiled is not None:
            self._profiled.end(self._completions)
        with self._lock:
            self._error, self._ended = error, True
            event, future = self._event, self._future
        if event is not None:
            event.set()
        if future is not None:
            self._completions.submit(lambda: future.set_result(None))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation is over, for `timeout` at most if one is given, and return True.

        Raises BackendError when the operation has failed or `timeout` has passed.
        """
        if not self._ended:
            self._await(timeout.total_seconds() if timeout > NO_TIMEOUT else None)
        if self._error is not None:
            raise BackendError(*self._error.args) from self._error.__cause__
        if self._streams is not None:
            self._streams.wait(self._filled)
        return True

    def _await(self, seconds: float | None) -> None:
        """Wait for `seconds`, without limit for None; an operation has a timeout of its own too."""
        with self._lock:
            if self._ended:
                return
            self._event = self._event or threading.Event()
        if not self._event.wait(seconds):
            raise BackendError(f"{self.name}: Timed out waiting {seconds:g} s; it is still under way")

    synchronize = wait

    def is_completed(self) -> bool:
        return self._ended

    def is_success(self) -> bool:
        return self._ended and self._error is None

    def exception(self) -> BackendError | None:
        return self._error

    def result(self) -> Any:
        """Wait, and return the tensors that the operation filled, for any stream of their device."""
        self.wait()
        if self._filled is not None:
            self._filled.synchronize()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the operation fills."""
        with self._lock:
            first = self._future is None
            future: torch.futures.Future[Any] = self._future or torch.futures.Future()
            self._future, ended = future, self._ended
        if first and ended:
            future.set_result(None)
        return future.then(lambda _: self.result())


class Completions:
    """Threads of their own that run submitted functions, in order of submission."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
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
            thread = threading.Thread(target=self._run, name="unisono completions", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, seconds: float) -> None:
        """End the threads once they have run what was submitted; wait `seconds` for each at most."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(seconds)

    def _run(self) -> None:
        while (complete := self._queue.get()) is not None:
            complete()
            del complete  # its work, which would live until the next one
            with self._lock:
                self._free += 1


class Event:
    """Profiler event of an operation, from its creation until `end`.

    One that ends on another thread than it began on counts as asynchronous, as these events do.
    """

    def __init__(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        handle = torch.autograd._record_function_with_args_enter(f"unisono:{name}", *inputs)  # type: ignore[attr-defined]
        self._over: torch.futures.Future[None] = torch.futures.Future()
        torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, self._over)
        self._thread = threading.get_ident()

    def end(self, completions: Completions) -> None:
        """End the event; return once the profiler has recorded it."""
        if threading.get_ident() != self._thread:
            self._over.set_result(None)
            return
        known = threading.Event()

        def end_event() -> None:
            self._over.set_result(None)
            known.set()

        completions.submit(end_event)
        known.wait()


def profiled(name: str, inputs: Sequence[torch.Tensor]) -> Event | None:
    """Return the profiler event of an operation on `inputs` that begins; None if no profiler is active."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    return Event(name, [tensor for tensor in inputs if not tensor.is_sparse])


class SubmissionQueue:
    """Queue of one group's collectives, which it carries out. `group` is the group's name in messages. The watch ends
    `calls`, those of the group, after the time-out of the collective that is carried out."""

    def __init__(self, group: str, rank: int, size: int, calls: Calls) -> None:
        self.group, self.rank, self.size, self.calls = group, rank, size, calls
        self.ended = ""
        """Error of collectives after the end of the group; empty before it."""
        self._closed = False  # the thread carries out what is queued, and nothing more
        self._number = 0
        self._waiting = 0  # collectives that are not over
        self._queue: SimpleQueue[tuple[Callable[[], object], Work] | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._run_lock = threading.Lock()  # held while a collective is carried out
        self._thread: threading.Thread | None = None

    def submit(self, action: Callable[[], object], work: Work, blocking: bool) -> Work:
        """Carry `action` out, and return its `work`: in this thread if it is blocking and nothing is under way; all
        others are queued, and fail after `close`."""
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

    def _carry_out(self, action: Callable[[], object], work: Work) -> None:
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
