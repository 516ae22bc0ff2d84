"""Engine that carries operations out once their dependencies allow, on threads by kind (MXNET-MPI section 3).

    weights, gradients, sums = Variable("weights"), Variable("gradients"), Variable("sums")
    engine.push(exchange, read=[gradients], mutate=[sums], kind="communication")
    engine.push(update, read=[sums], mutate=[weights], kind="update")        runs when the exchange is done
    engine.wait(weights)                                                     raises the error of any of them

    push ──▶ enqueue ── ready ──▶ thread pool of its kind ──▶ complete ── ready ──▶ ...
                └── not ready: stays in the queues of its variables ──────▲

Pushing costs a few microseconds and never waits. Operations pushed by one thread have that thread's order. Pushes from
several threads must be ordered by the caller, as each order makes another serial execution.

Spans, the time and the thread of work that was carried out, are also those of work without the engine:

    with observed(observe, "read batch", "loading"):
        ...                     observe(OperationSpan("read batch", "loading", "MainThread", 0.2, 0.3))
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Self, cast

from unisono.engine.dependencies import Failure, PendingOperation, Variable, complete, enqueue
from unisono.errors import OperationError, UsageError

MAIN = "main"
"""Kind of the operations that the main thread carries out itself; it waits until they may run."""

Action = Callable[[], object]


class OperationSpan(NamedTuple):
    """Time and thread of an operation that was carried out."""

    name: str
    kind: str
    thread: str
    begin: float
    """Seconds, by `time.perf_counter`."""
    end: float
    about: Any = None
    """Description from the caller that pushed the operation: a task of a step program."""


Observe = Callable[[OperationSpan], None]
"""Called with the span of an operation that was carried out, by the thread that has carried it out."""


@contextmanager
def observed(observe: Observe | None, name: str, kind: str) -> Iterator[None]:
    """Report the block to `observe`, if given, as a span of this thread, once it has ended without an error."""
    begin = 0.0 if observe is None else time.perf_counter()
    yield
    if observe is not None:
        observe(OperationSpan(name, kind, threading.current_thread().name, begin, time.perf_counter()))


class Handle(PendingOperation):
    """Operation that was pushed."""

    def __init__(
        self,
        name: str,
        read: Iterable[Variable],
        mutate: Iterable[Variable],
        action: Action | None = None,
        kind: str = MAIN,
        observe: Observe | None = None,
        about: Any = None,
    ) -> None:
        super().__init__(name, read, mutate)
        self.action, self.kind, self.observe, self.about = action, kind, observe, about
        self.ready = False
        """True once its variables have admitted it."""
        self.ended = False
        """True once nothing is left to be carried out. Changes once, with the engine's lock held."""
        self.may_run = threading.Event()
        """Set when a caller outside the engine's threads may carry it out."""
        self.over = threading.Event()

    @property
    def succeeded(self) -> bool:
        """True once it is over without a failure."""
        return self.over.is_set() and self.failure is None

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, `seconds` at most; return True if it is. Raises OperationError when it has failed."""
        if not self.over.wait(seconds):
            return False
        if (failure := self.failure) is not None:
            name = self.name
            where = failure.operation if failure.operation == name else f"{failure.operation}, needed by {name},"
            raise OperationError(f"{where} failed: {type(failure.error).__name__}: {failure.error}") from failure.error
        return True


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
        if len(self._threads) < self._size:
            self._start()

    def close(self) -> None:
        """End the threads, once all submitted actions are done."""
        with self._lock:  # another thread may still be starting them, although its action is done
            _end(self._queue, len(self._threads))
            for thread in self._threads:
                thread.join()
            self._threads = []

    def grow(self, threads: int) -> None:
        """Provide at least `threads` threads, from the next action on."""
        self._size = max(self._size, threads)

    def _start(self) -> None:
        with self._lock:
            added = [
                threading.Thread(target=_work, args=(self._queue,), name=f"unisono {self._name} {index}", daemon=True)
                for index in range(len(self._threads), self._size)
            ]
            self._threads += added
            weakref.finalize(self, _end, self._queue, len(added)).atexit = False
            for thread in added:
                thread.start()


class Closing(ABC):
    """Object that its `with` block closes on success; after an error it is not closed, as work may never end."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the work under way, and end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.close()


def weakly(method: Callable[..., Any], gone: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that calls a bound method as long as its object lives, and then `gone`, or nothing."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **named: Any) -> Any:
        living = reference() or gone
        return None if living is None else living(*arguments, **named)

    return call


class Engine(Closing):
    """Engine with so many `threads` for each kind of work."""

    def __init__(self, threads: Mapping[str, int]) -> None:
        self._pools = {kind: ThreadPool(kind, count) for kind, count in threads.items()}
        self._pending = 0  # operations that are not over
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def push(
        self,
        action: Action,
        read: Iterable[Variable] = (),
        mutate: Iterable[Variable] = (),
        kind: str = "update",
        name: str = "",
        observe: Observe | None = None,
        about: Any = None,
    ) -> Handle:
        """Carry `action` out once earlier operations let it `read` and `mutate` these variables; return its handle.

        `observe` is called with a span that carries `about`. Raises UsageError for a kind for which the engine has no
        threads.
        """
        if kind not in self._pools:
            raise UsageError(f"the engine has no threads for {kind!r}; it has {', '.join(self._pools)}")
        return self._add(Handle(name or kind, read, mutate, action, kind, observe, about))

    def grow(self, kind: str, threads: int) -> None:
        """Provide at least `threads` threads for a kind of work."""
        self._pools[kind].grow(threads)

    def carry_out(
        self,
        action: Action,
        read: Iterable[Variable],
        mutate: Iterable[Variable],
        name: str,
        observe: Observe | None = None,
        about: Any = None,
    ) -> None:
        """Carry `action` out in this thread, once earlier operations allow it, and return when it is over.

        Raises OperationError when an operation that it needs has failed, and whatever `action` raises.
        """
        handle = self._add(Handle(name, read, mutate, observe=observe, about=about))
        try:
            handle.may_run.wait()
            if handle.failure is not None:
                handle.wait()
            begin = time.perf_counter()
            action()
        except BaseException as error:  # operations that need this one must not wait for ever after an interrupt
            self.end(handle, error)
            raise
        self._report(handle, begin)
        self.end(handle)

    def end(self, expected: Handle, error: BaseException | None = None) -> None:
        """End an operation that the caller carries out, with its error if it failed.

        Do nothing if it is over already, because an operation that it needs has failed.
        """
        with self._lock:
            if expected.ended:
                return
            expected.ended = True
            if error is not None:
                expected.failure = Failure(expected.name, error)
            ready = expected.ready
        if ready:
            self._finish(expected)

    def wait(self, *variables: Variable, seconds: float | None = None) -> bool:
        """Wait until all operations pushed to mutate these variables are over, `seconds` at most; return True if so.

        Raises OperationError when one of them, or one that they needed, has failed.
        """
        probe = Handle(f"a wait for {', '.join(variable.name for variable in variables)}", variables, ())
        probe.ended = True
        return self._add(probe).wait(seconds)

    def close(self) -> None:
        """End the threads once all pushed operations are over. Failures that no caller waited for are dropped."""
        with self._idle:
            self._idle.wait_for(lambda: not self._pending)
        for pool in self._pools.values():
            pool.close()

    def _add(self, handle: Handle) -> Handle:
        with self._lock:
            self._pending += 1
            ready = enqueue(handle)
            over = ready and self._admit(handle)
        if over:
            self._finish(handle)
        elif ready:  # as it was under the lock: from then on another thread may admit it
            self._begin(handle)
        return handle

    def _admit(self, handle: Handle) -> bool:
        """Mark the operation as admitted; return True if it is over with that. Called with the lock held."""
        handle.ready = True
        handle.ended = handle.ended or handle.failure is not None
        return handle.ended

    def _begin(self, handle: Handle) -> None:
        """Run the operation, by a thread of its kind or by the caller that waits for `may_run`."""
        if handle.action is None:
            handle.may_run.set()
        else:
            self._pools[handle.kind].submit(partial(self._carry_out, handle, handle.action))

    def _carry_out(self, handle: Handle, action: Action) -> None:
        begin = time.perf_counter()
        try:
            action()
            self._report(handle, begin)
        except BaseException as error:  # noqa: BLE001 - any error must reach whoever waits for the result
            handle.failure = Failure(handle.name, error)
        self._finish(handle)

    def _report(self, handle: Handle, begin: float) -> None:
        if handle.observe is not None:
            thread = threading.current_thread().name
            now = time.perf_counter()
            handle.observe(OperationSpan(handle.name, handle.kind, thread, begin, now, handle.about))

    def _finish(self, handle: Handle) -> None:
        """End the operation: admit others, and end those of them that have nothing to carry out."""
        over = [handle]
        while over:
            handle = over.pop()
            begin: list[Handle] = []
            with self._idle:
                for successor in cast(list[Handle], complete(handle)):
                    (over if self._admit(successor) else begin).append(successor)
                self._pending -= 1
                if not self._pending:
                    self._idle.notify_all()
            handle.may_run.set()
            handle.over.set()
            for successor in begin:
                self._begin(successor)
