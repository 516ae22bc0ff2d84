"""Timeline of a run: the spans of all ranks in lanes, the predicted spans of each step under the measured ones.

    rank 0   spans, begins of steps with their prediction ┐
    rank 1   spans, begins of steps with their prediction ┼─ all_gather ─▶ trace events ─▶ FILE, by rank 0
    rank 2   ...                                          ┘

A span costs an entry in a list; predicted steps are played when the file is written. It has a process for each rank and
a thread for each lane, in an order that is the same in every run; https://ui.perfetto.dev opens it:

    rank 0   main                      │wait for data│ forward │ backward │          evaluate │ evaluate │
             predicted main                          │ forward │backward 1│
             communication 0                                 │   │allreduce 1│    an arrow leads from the gradient
             predicted communication                             │allreduce 1│    to its allreduce to its update
             update 0                                        │pack 1│    ▲  └▶│update 1│
             predicted update                                                │update 1│
             loading                   │read batch│
             decoding 0, 1, ...        │ decode │ decode │
             shuffle                 │ shuffle │
             evaluation                                                     │     evaluation     │
             checkpoint                                                                          │gather│write│

Work of a thread of its own has the thread's lane, where a late or an idle thread shows. Loading, shuffle, evaluation
and checkpoint have a lane each, whichever thread does the work. Predicted spans are those of a predicted step, laid at
the begin of each measured one:

    a predicted step           │ forward │   backward 1   │           measured steps that begin at 0 and at 10
                                              │ allreduce 1 │

    predicted main             │ forward │   backward 1   │ │ forward │   backward 1   │
    predicted communication                   │ allreduce 1 │             │ allreduce 1 │
                               0                            10

The prediction of a step that was faster than predicted ends after the next one begins. That one goes, as a whole, to a
lane of its own below: "predicted main 2". Predicted collectives that run at once have a lane each, too.

Trace Event Format, Google: complete events (X), flows (s, t, f) and names (M). Spans of a lane are disjoint or nested:
the format has no others. Times are in microseconds, here with whole nanoseconds, to which Perfetto rounds: spans that
touch still do.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from unisono.engine import OperationSpan, observed
from unisono.plan.choose import Candidate
from unisono.step import operations as op
from unisono.step.predict import TaskSpan, steady_step, tracks
from unisono.step.program import Task
from unisono.world import World

LANES = (
    *("main", "computing", "node", "communication", "copies", "update", "server"),
    *("loading", "decoding", "test decoding", "shuffle", "evaluation", "checkpoint"),
)
"""Lanes of a rank from top to bottom, without the numbers of threads."""

LANES_BY_KIND = frozenset(("loading", "shuffle", "evaluation", "checkpoint"))
"""Kinds of work with a lane of their own, whichever thread does it."""

MAIN_THREAD = "MainThread"
"""Name of Python's main thread."""

PREDICTED = "predicted "
"""Prefix of the lane of predicted spans, which lies under the measured lane."""

Event = dict[str, Any]


class Timeline:
    """Collects the spans of one rank. All ranks of `world` make one together: clocks begin after a common barrier."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.barrier()
        self._zero = time.perf_counter()
        self._spans: list[OperationSpan] = []
        self._steps: list[tuple[float, Candidate]] = []

    def add(self, span: OperationSpan) -> None:
        self._spans.append(span)

    def span(self, name: str, kind: str) -> AbstractContextManager[None]:
        """Record the block as a span of this thread."""
        return observed(self.add, name, kind)

    def begin_step(self, begin: float, chosen: Candidate) -> None:
        """Add a step that began at `begin`, by `time.perf_counter`, and whose setting was predicted as `chosen`."""
        self._steps.append((begin, chosen))

    def write(self, path: Path) -> None:
        """Write the spans of all ranks. Called by all ranks together; rank 0 writes."""
        settings = {id(chosen): chosen for _, chosen in self._steps}  # a few, each of many steps
        played = {key: spans_of(steady_step(chosen.rule, chosen.costs)) for key, chosen in settings.items()}
        predicted = lay([(begin - self._zero, played[id(chosen)]) for begin, chosen in self._steps])
        spans = [*(timeline_span(span, self._zero) for span in self._spans), *predicted]
        everyone = self._world.all_gather_object(spans)
        self._world.call_on_root(lambda: path.write_text(json.dumps(document(everyone))))


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
    name, _, lane_number = lane.removeprefix(PREDICTED).rpartition(" ")
    if not lane_number.isdecimal():
        name, lane_number = lane.removeprefix(PREDICTED), "0"
    place = LANES.index(name) if name in LANES else len(LANES)
    return place, lane.startswith(PREDICTED), name, int(lane_number)


def spans_of(step: Sequence[TaskSpan]) -> list[TimelineSpan]:
    """Return the spans of a played step's tasks that take time. Parameters that are read one after another, without a
    wait between them, are one span: `forward`."""
    spans: list[TimelineSpan] = []
    forward: int | None = None  # place of the last of these
    for span in sorted((played for played in step if played.end > played.begin), key=lambda played: played.begin):
        reads = span.task.operation in (op.BEGIN, op.FORWARD)
        name, lane = op.FORWARD.name if reads else str(span.task), PREDICTED + span.task.lane
        if reads and forward is not None and spans[forward].end == span.begin:
            spans[forward] = spans[forward]._replace(end=span.end)
            continue
        forward = len(spans) if reads else forward
        spans.append(TimelineSpan(name, PREDICTED.strip(), lane, span.begin, span.end))
    return spans


class LaidStep(NamedTuple):
    """Spans of one step in one lane, on the clock of all steps, and the time that they take together."""

    begin: float
    """Seconds."""
    end: float
    spans: list[TimelineSpan]


def lay(steps: Sequence[tuple[float, Sequence[TimelineSpan]]]) -> list[TimelineSpan]:
    """Return the predicted spans of steps on the clock of their begins, by lane and in order of time. `steps` are the
    begin of each measured step, in seconds, and its predicted spans in seconds since then."""
    lanes = dict.fromkeys(span.lane for _, spans in steps for span in spans)
    return [span for lane in lanes for span in _numbered([*_laid(steps, lane)])]


def _laid(steps: Sequence[tuple[float, Sequence[TimelineSpan]]], lane: str) -> Iterator[LaidStep]:
    """Yield what steps have in a lane."""
    for begin, spans in steps:
        in_lane = [span._replace(begin=begin + span.begin, end=begin + span.end) for span in spans if span.lane == lane]
        if in_lane:
            yield LaidStep(min(span.begin for span in in_lane), max(span.end for span in in_lane), in_lane)


def _numbered(steps: Sequence[LaidStep]) -> Iterator[TimelineSpan]:
    """Yield the spans of a lane, in lanes of their own where they overlap: first spans of one step, then steps."""
    height = max(len(tracks(step.spans)) for step in steps)
    for turn, together in enumerate(tracks(steps)):
        for step in together:
            for row, track in enumerate(tracks(step.spans)):
                index = turn * height + row + 1
                yield from (span if index == 1 else span._replace(lane=f"{span.lane} {index}") for span in track)


def document(ranks: Iterable[Sequence[TimelineSpan]]) -> dict[str, Any]:
    """Return the trace of the spans of all ranks, as the JSON object that the format prescribes."""
    trace_events = [event for rank, spans in enumerate(ranks) for event in events(rank, spans)]
    return {"traceEvents": trace_events, "displayTimeUnit": "ms"}


def events(rank: int, spans: Sequence[TimelineSpan]) -> Iterator[Event]:
    """Yield the trace events of one rank, whose spans begin at second 0."""
    lanes = {name: lane for lane, name in enumerate(sorted({span.lane for span in spans}, key=lane_order))}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for name, lane in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}
    for span in spans:
        begin, end = _nanoseconds(span.begin), _nanoseconds(span.end)
        place = {"pid": rank, "tid": lanes[span.lane], "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "name": span.name, "cat": span.kind, **place}
    for index, chain in enumerate(_chains(spans)):
        for position, (span, seconds) in enumerate(chain):
            phase = "s" if position == 0 else "f" if position == len(chain) - 1 else "t"
            place = {"pid": rank, "tid": lanes[span.lane], "ts": _nanoseconds(seconds) / 1e3}
            yield {"ph": phase, "bp": "e", "name": "gradient", "cat": "gradient", "id": f"{rank}.{index}", **place}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _chains(spans: Sequence[TimelineSpan]) -> Iterator[list[tuple[TimelineSpan, float]]]:
    """Yield chains of spans, each with a time: the backward pass that made the gradient, its allreduce, its update."""
    in_order = sorted(spans, key=lambda span: span.begin)
    backwards = [span for span in in_order if span.name == "backward"]
    of = defaultdict[tuple[str, int], list[TimelineSpan]](list)
    for span in in_order:
        of[span.operation, span.key].append(span)
    for key in dict.fromkeys(span.key for span in in_order if span.operation == "pack"):
        packs = of["pack", key]
        for pack, until in zip(packs, (*(later.begin for later in packs[1:]), float("inf")), strict=True):
            later = [
                span
                for operation in ("allreduce", "update")
                for span in of[operation, key]
                if pack.end <= span.end and pack.begin <= span.begin < until
            ]
            source = next((backward for backward in reversed(backwards) if backward.begin <= pack.begin), None)
            if source is not None and later:
                yield [(source, min(pack.begin, source.end)), *((span, span.begin) for span in later[:2])]
