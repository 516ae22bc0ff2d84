"""Timeline of a run, by rank and thread: a Chrome trace, which https://ui.perfetto.dev opens.

    rank 0   MainThread      │ forward │      backward      │ forward ...
             communication             │   │allreduce 1│allreduce 2│
             update                    │ pack 1 ▲  └▶│update 1│
                                  an arrow from the gradient to its allreduce to its update

Trace Event Format, Google: complete events (X), flows (s, t, f) and names (M); microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from unisono.engine import OperationSpan
from unisono.errors import UsageError
from unisono.step.program import Task
from unisono.world import World

Event = dict[str, Any]

BACKWARD = "backward"
"""The span of a whole backward pass."""

FOLLOWING = ("allreduce", "update")
"""Operations that follow the packing of a bucket."""

THREAD_ORDER = ("MainThread", "computing", "communication", "update", "loading")
"""Lanes of a rank from top to bottom, by words in the names of their threads."""


class TimelineSpan(NamedTuple):
    """A span, with the operation and the bucket of its task."""

    name: str
    kind: str
    thread: str
    begin: float
    """Seconds."""
    end: float
    operation: str = ""
    """Name of the operation; empty for a span that belongs to no step program."""
    key: int = 0


def timeline_span(span: OperationSpan, zero: float = 0.0) -> TimelineSpan:
    """Return the TimelineSpan of a span, on a clock that begins at `zero`."""
    task = span.about
    operation, key = (task.operation.name, task.key) if isinstance(task, Task) else ("", 0)
    return TimelineSpan(span.name, span.kind, span.thread, span.begin - zero, span.end - zero, operation, key)


class Timeline:
    """Collects the spans of one rank. All ranks of `world` make one together: clocks begin after a common barrier."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.barrier()
        self._zero = time.perf_counter()
        self._spans: list[OperationSpan] = []

    def add(self, span: OperationSpan) -> None:
        """Add a span."""
        self._spans.append(span)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the block as a span of this thread."""
        begin = time.perf_counter()
        yield
        self.add(OperationSpan(name, "computing", threading.current_thread().name, begin, time.perf_counter()))

    def write(self, path: Path) -> None:
        """Write the spans of all ranks. Called by all ranks together; rank 0 writes."""
        everyone = self._world.all_gather_object([timeline_span(span, self._zero) for span in self._spans])

        def put() -> None:
            found = [event for rank, mine in enumerate(everyone) for event in events(rank, mine)]
            path.write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))

        self._world.call_on_root(put)


def check_writable(path: Path) -> None:
    """Raise UsageError when a timeline cannot be written there, so that this is known before the run."""
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write the timeline {path}: {error.strerror}") from error


def events(rank: int, spans: Sequence[TimelineSpan]) -> Iterator[Event]:
    """Yield the trace events of one rank, whose spans begin at second 0."""
    lanes = {name: number for number, name in enumerate(sorted({span.thread for span in spans}, key=_lane_order))}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for name, lane in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}
    for span in spans:
        yield {
            **{"ph": "X", "name": span.name, "cat": span.kind, "pid": rank, "tid": lanes[span.thread]},
            **{"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6},
        }
    for number, chain in enumerate(_chains(spans)):
        for position, (span, at) in enumerate(chain):
            phase = "s" if position == 0 else "f" if position == len(chain) - 1 else "t"
            yield {
                **{"ph": phase, "bp": "e", "name": "gradient", "cat": "gradient", "id": f"{rank}.{number}"},
                **{"pid": rank, "tid": lanes[span.thread], "ts": at * 1e6},
            }


def _chains(spans: Sequence[TimelineSpan]) -> Iterator[list[tuple[TimelineSpan, float]]]:
    """Yield chains of spans, each with a time: the backward pass that made the gradient, its allreduce, its update."""
    backwards = sorted((span for span in spans if span.name == BACKWARD), key=lambda span: span.begin)
    of = {what: _by_key(spans, what) for what in ("pack", *FOLLOWING)}
    for key, packs in of["pack"].items():
        for number, pack in enumerate(packs):
            until = packs[number + 1].begin if number + 1 < len(packs) else float("inf")
            later = [
                span
                for what in FOLLOWING
                for span in of[what][key]
                if pack.end <= span.end and pack.begin <= span.begin < until
            ]
            source = next((one for one in reversed(backwards) if one.begin <= pack.begin), None)
            if source is not None and later:
                yield [(source, min(pack.begin, source.end)), *((span, span.begin) for span in later[:2])]


def _by_key(spans: Iterable[TimelineSpan], operation: str) -> defaultdict[int, list[TimelineSpan]]:
    found: defaultdict[int, list[TimelineSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        if span.operation == operation:
            found[span.key].append(span)
    return found


def _lane_order(thread: str) -> tuple[int, str]:
    return next((number for number, word in enumerate(THREAD_ORDER) if word in thread), len(THREAD_ORDER)), thread
