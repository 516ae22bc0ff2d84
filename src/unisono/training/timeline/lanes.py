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

Predicted spans are those of a predicted step, laid at the begin of each measured one:

    a predicted step           │ forward │   backward 1   │           measured steps that begin at 0 and at 10
                                              │ allreduce 1 │

    predicted main             │ forward │   backward 1   │ │ forward │   backward 1   │
    predicted communication                   │ allreduce 1 │             │ allreduce 1 │
                               0                            10

The prediction of a step that was faster than predicted ends after the next one begins. That one goes, as a whole, to a
lane of its own below: "predicted main 2". Predicted collectives that run at once have a lane each, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.engine import OperationSpan
from unisono.step import operations as op
from unisono.step.clock import TaskSpan, tracks
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


KIND = "predicted"
"""Kind of predicted spans."""


class PredictedStep(NamedTuple):
    """Begin of a measured step, and its predicted spans in seconds since then."""

    begin: float
    """Seconds."""
    spans: Sequence[TimelineSpan]


class LaidStep(NamedTuple):
    """Spans of one step in one lane, on the clock of all steps, and the time that they take together."""

    begin: float
    """Seconds."""
    end: float
    spans: list[TimelineSpan]


def spans_of(step: Sequence[TaskSpan]) -> list[TimelineSpan]:
    """Return the spans of a played step. Tasks that take no time are left out.

    Parameters that are read one after another, without a wait between them, are one span: `forward`.
    """
    found: list[TimelineSpan] = []
    forward: int | None = None  # place of the last of these
    for span in sorted((one for one in step if one.end > one.begin), key=lambda one: one.begin):
        reads = span.task.operation in (op.BEGIN, op.FORWARD)
        name, lane = op.FORWARD.name if reads else str(span.task), PREDICTED + span.task.lane
        if reads and forward is not None and found[forward].end == span.begin:
            found[forward] = found[forward]._replace(end=span.end)
            continue
        forward = len(found) if reads else forward
        found.append(TimelineSpan(name, KIND, lane, span.begin, span.end))
    return found


def lay(steps: Sequence[PredictedStep]) -> list[TimelineSpan]:
    """Return the predicted spans of all steps, on the clock of their begins, by lane and in order of time."""
    lanes = dict.fromkeys(one.lane for step in steps for one in step.spans)
    return [span for lane in lanes for span in _numbered([*_laid(steps, lane)])]


def _laid(steps: Sequence[PredictedStep], lane: str) -> Iterator[LaidStep]:
    """Yield what steps have in a lane."""
    for begin, spans in steps:
        mine = [one._replace(begin=begin + one.begin, end=begin + one.end) for one in spans if one.lane == lane]
        if mine:
            yield LaidStep(min(one.begin for one in mine), max(one.end for one in mine), mine)


def _numbered(steps: Sequence[LaidStep]) -> Iterator[TimelineSpan]:
    """Yield the spans of a lane, in lanes of their own where they overlap: first spans of one step, then steps."""
    height = max(len(tracks(step.spans)) for step in steps)
    for turn, together in enumerate(tracks(steps)):
        for step in together:
            for row, track in enumerate(tracks(step.spans)):
                number = turn * height + row + 1
                yield from (one if number == 1 else one._replace(lane=f"{one.lane} {number}") for one in track)
