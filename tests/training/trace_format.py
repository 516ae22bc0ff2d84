"""Check of a trace against the Trace Event Format, with what Perfetto demands beyond it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]
Track = tuple[int, int]

METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
"""Names of metadata events: the key and the type of their argument."""


def check_trace(document: dict[str, Any]) -> None:
    """Assert that all events have what their phase requires, that tracks are named, that spans of a track are disjoint
    or nested, and that each end of an arrow lies within a span."""
    assert set(document) <= {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    for event in events:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        if event["ph"] == "M":
            key, kind = METADATA[event["name"]]
            assert type(event["args"][key]) is kind
            assert type(event.get("tid", 0)) is int
        else:
            assert event["ph"] in ("X", "s", "t", "f")
            assert type(event["tid"]) is int
            assert isinstance(event["cat"], str)
            assert nanoseconds(event["ts"]) >= 0
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} <= named
    spans = spans_of(events)
    for track in spans.values():
        check_nested(track)
    _check_arrows(events, spans)


def nanoseconds(microseconds: float) -> int:
    """Return a time in whole nanoseconds, to which Perfetto rounds. The trace must have no others."""
    rounded = round(microseconds * 1e3)
    assert rounded / 1e3 == microseconds
    return rounded


def spans_of(events: Sequence[Event]) -> dict[Track, list[tuple[int, int]]]:
    """Return begin and end of the spans of each track, in nanoseconds, an outer span before those within it."""
    spans_of_tracks = defaultdict[Track, list[tuple[int, int]]](list)
    for event in events:
        if event["ph"] == "X":
            begin, duration = nanoseconds(event["ts"]), nanoseconds(event["dur"])
            assert duration >= 0
            spans_of_tracks[event["pid"], event["tid"]].append((begin, begin + duration))
    return {track: sorted(spans, key=lambda span: (span[0], -span[1])) for track, spans in spans_of_tracks.items()}


def check_nested(spans: Sequence[tuple[int, int]]) -> None:
    """Assert that spans are disjoint or nested."""
    outer: list[int] = []
    for begin, end in spans:
        while outer and outer[-1] <= begin:
            outer.pop()
        assert not outer or end <= outer[-1], f"the span {begin} to {end} crosses the end of one at {outer[-1]}"
        outer.append(end)


def _check_arrows(events: Sequence[Event], spans: dict[Track, list[tuple[int, int]]]) -> None:
    arrows = defaultdict[str, list[Event]](list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            arrows[event["id"]].append(event)
    for arrow in arrows.values():
        phases = "".join(event["ph"] for event in arrow)
        assert phases == "s" + "t" * (len(arrow) - 2) + "f"
        times = [nanoseconds(event["ts"]) for event in arrow]
        assert times == sorted(times)
        for event, time in zip(arrow, times, strict=True):
            assert event["bp"] == "e", "an arrow leads to the span that encloses it"
            assert any(begin <= time <= end for begin, end in spans[event["pid"], event["tid"]])
