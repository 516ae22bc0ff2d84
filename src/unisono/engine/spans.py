"""Spans: the time and the thread of work that was carried out. Who does the work reports them to an observer.

with observed(observe, "read batch", "loading"):
    ...                     observe(OperationSpan("read batch", "loading", "MainThread", 0.2, 0.3))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


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
