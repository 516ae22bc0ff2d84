"""Lanes of a timeline: each span has one under its rank, in an order that is the same in every run.

    rank 0   main                      │wait for data│ forward │ backward │          evaluate │ evaluate │
             predicted main                          │ forward │backward 1│
             communication 0                                     │allreduce 1│
             predicted communication                             │allreduce 1│
             update 0                                          │pack 1│      │update 1│
             predicted update                                                │update 1│
             loading                   │read batch│
             decoding 0                │ decode │ decode │
             decoding 1                │ decode │ decode │
             shuffle                 │ shuffle │
             evaluation                                                     │     evaluation     │
             checkpoint                                                                          │gather│write│

Work of a thread of its own has the thread's lane, where a late or an idle thread shows. Decoding has as many lanes as
threads: 8 at most, unless the recipe asks for more. Loading, shuffle, evaluation and checkpoint have a lane each,
whichever thread does the work. It is the main one, whose own lane has what it does meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.engine import OperationSpan
from unisono.step.program import Task

LANES = (
    *("main", "computing", "communication", "update", "server"),
    *("loading", "decoding", "test decoding", "shuffle", "evaluation", "checkpoint"),
)
"""Lanes of a rank from top to bottom, without the numbers of threads."""

LANES_BY_KIND = frozenset(("loading", "shuffle", "evaluation", "checkpoint"))
"""Kinds of work with a lane of their own, whichever thread does it."""

MAIN_THREAD = "MainThread"
"""Name of Python's main thread."""

PREDICTED = "predicted "
"""Prefix of the lane of predicted spans, which lies under the measured lane."""


class TimelineSpan(NamedTuple):
    """Span in its lane, with the operation and the bucket of its task."""

    name: str
    kind: str
    lane: str
    begin: float
    """Seconds."""
    end: float
    operation: str = ""
    """Name of the operation; empty for a span that belongs to no step program."""
    key: int = 0


def timeline_span(span: OperationSpan, zero: float = 0.0) -> TimelineSpan:
    """Return the TimelineSpan of a span, on a clock that begins at `zero`."""
    task, lane = span.about, lane_of(span.kind, span.thread)
    operation, key = (task.operation.name, task.key) if isinstance(task, Task) else ("", 0)
    return TimelineSpan(span.name, span.kind, lane, span.begin - zero, span.end - zero, operation, key)


def lane_of(kind: str, thread: str) -> str:
    """Return the lane of work of a kind on a thread.

    >>> lane_of("communication", "unisono communication 1"), lane_of("decoding", "decoding_3")
    ('communication 1', 'decoding 3')
    """
    if kind in LANES_BY_KIND:
        return kind
    return LANES[0] if thread == MAIN_THREAD else thread.removeprefix("unisono ").replace("_", " ")


def lane_order(lane: str) -> tuple[int, bool, str, int]:
    """Return the key by which lanes are sorted: the place in LANES, measured before predicted, then the number.

    >>> sorted(["update 10", "predicted update", "main", "update 9"], key=lane_order)
    ['main', 'update 9', 'update 10', 'predicted update']
    """
    name, _, number = lane.removeprefix(PREDICTED).rpartition(" ")
    if not number.isdecimal():
        name, number = lane.removeprefix(PREDICTED), "0"
    place = LANES.index(name) if name in LANES else len(LANES)
    return place, lane.startswith(PREDICTED), name, int(number)
