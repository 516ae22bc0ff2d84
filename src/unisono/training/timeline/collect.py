"""Collection of the spans of a run, on each rank by itself, and the file that all ranks write at its end.

    rank 0   spans, begins of steps with their prediction ┐
    rank 1   spans, begins of steps with their prediction ┼─ all_gather ─▶ trace events ─▶ FILE, by rank 0
    rank 2   ...                                          ┘

A span costs an entry in a list. Predicted steps are played when the file is written. It has a process for each rank, a
thread for each lane; https://ui.perfetto.dev opens it:

    rank 0   main                │ forward │      backward      │ forward ...
             communication 0               │   │allreduce 1│allreduce 2│
             update 0                      │ pack 1 ▲  └▶│update 1│
                                 an arrow from the gradient to its allreduce to its update

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
from typing import Any

from unisono.engine import OperationSpan, observed
from unisono.errors import UsageError
from unisono.plan.choose import Candidate
from unisono.step.predict import steady_step
from unisono.training.timeline.lanes import PredictedStep, TimelineSpan, lane_order, lay, spans_of, timeline_span
from unisono.world import World


class Timeline:
    """Collects the spans of one rank. All ranks of `world` make one together: clocks begin after a common barrier."""

    def __init__(self, world: World) -> None:
        self._world = world
        world.barrier()
        self._zero = time.perf_counter()
        self._spans: list[OperationSpan] = []
        self._steps: list[tuple[float, Candidate]] = []

    def add(self, span: OperationSpan) -> None:
        """Add a span."""
        self._spans.append(span)

    def span(self, name: str, kind: str) -> AbstractContextManager[None]:
        """Record the block as a span of this thread."""
        return observed(self.add, name, kind)

    def begin_step(self, begin: float, chosen: Candidate) -> None:
        """Add a step that began at `begin`, by `time.perf_counter`, and whose setting was predicted as `chosen`."""
        self._steps.append((begin, chosen))

    def write(self, path: Path) -> None:
        """Write the spans of all ranks. Called by all ranks together; rank 0 writes."""
        mine = [*(timeline_span(span, self._zero) for span in self._spans), *self._predicted()]
        everyone = self._world.all_gather_object(mine)
        self._world.call_on_root(lambda: path.write_text(json.dumps(document(everyone))))

    def _predicted(self) -> list[TimelineSpan]:
        """Return the predicted spans of the steps that have a prediction."""
        settings = {id(chosen): chosen for _, chosen in self._steps}  # a few, each of many steps
        played = {key: spans_of(steady_step(chosen.rule, chosen.costs)) for key, chosen in settings.items()}
        return lay([PredictedStep(begin - self._zero, played[id(chosen)]) for begin, chosen in self._steps])


def check_writable(path: Path) -> None:
    """Raise UsageError when a timeline cannot be written there, so that this is known before the run."""
    try:
        path.open("a").close()
    except OSError as error:
        raise UsageError(f"cannot write the timeline {path}: {error.strerror}") from error


Event = dict[str, Any]

BACKWARD = "backward"
"""The span of a whole backward pass."""

FOLLOWING = ("allreduce", "update")
"""Operations that follow the packing of a bucket."""


def document(ranks: Iterable[Sequence[TimelineSpan]]) -> dict[str, Any]:
    """Return the trace of the spans of all ranks, as the JSON object that the format prescribes."""
    found = [event for rank, spans in enumerate(ranks) for event in events(rank, spans)]
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def events(rank: int, spans: Sequence[TimelineSpan]) -> Iterator[Event]:
    """Yield the trace events of one rank, whose spans begin at second 0."""
    lanes = {name: number for number, name in enumerate(sorted({span.lane for span in spans}, key=lane_order))}
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for name, lane in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": {"sort_index": lane}}
    for span in spans:
        begin, end = _nanoseconds(span.begin), _nanoseconds(span.end)
        yield {
            **{"ph": "X", "name": span.name, "cat": span.kind, "pid": rank, "tid": lanes[span.lane]},
            **{"ts": begin / 1e3, "dur": (end - begin) / 1e3},
        }
    for number, chain in enumerate(_chains(spans)):
        for position, (span, at) in enumerate(chain):
            phase = "s" if position == 0 else "f" if position == len(chain) - 1 else "t"
            yield {
                **{"ph": phase, "bp": "e", "name": "gradient", "cat": "gradient", "id": f"{rank}.{number}"},
                **{"pid": rank, "tid": lanes[span.lane], "ts": _nanoseconds(at) / 1e3},
            }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


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
