"""Trace events of a run's spans: a process for each rank, a thread for each lane. https://ui.perfetto.dev opens them.

    rank 0   main                │ forward │      backward      │ forward ...
             communication 0               │   │allreduce 1│allreduce 2│
             update 0                      │ pack 1 ▲  └▶│update 1│
                                 an arrow from the gradient to its allreduce to its update

Trace Event Format, Google: complete events (X), flows (s, t, f) and names (M). Spans of a lane are disjoint or nested:
the format has no others. Times are in microseconds, here with whole nanoseconds, to which Perfetto rounds: spans that
touch still do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unisono.training.timeline.lanes import TimelineSpan, lane_order

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
