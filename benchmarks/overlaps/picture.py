"""Draws a part of a timeline that `unisono train --timeline FILE` has written: what Perfetto shows, as a picture.

python benchmarks/overlaps/picture.py FILE OUT.svg FIRST_MS LAST_MS
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.view.svg import Place, Span, SpanRow, draw_spans

WIDTH, MARKS = 1200.0, 6
"""Width of the rows in SVG units, and number of times under them."""

Event = dict[str, Any]


def main(source: str, target: str, first: str, last: str) -> None:
    """Draw what lies between two times, in milliseconds since the run began."""
    events: list[Event] = json.loads(Path(source).read_text())["traceEvents"]
    begin, end = float(first) * 1e3, float(last) * 1e3
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = defaultdict[tuple[int, int], list[Span]](list)
    for event in sorted(events, key=lambda event: -event.get("dur", 0)):  # what lies within another is drawn over it
        if event["ph"] == "X" and event["ts"] < end and event["ts"] + event["dur"] > begin:
            left, right = max(event["ts"], begin) - begin, min(event["ts"] + event["dur"], end) - begin
            tooltip = f"{event['name']}: {event['dur'] / 1e3:.3f} ms"
            kind = event["name"].partition(" ")[0]
            spans[event["pid"], event["tid"]].append(Span(left, right, event["name"], kind, tooltip))
    lanes = sorted(spans)
    chains: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            chains[event["id"]].append(event)
    arrows = [
        (_place(event, lanes, begin), _place(following, lanes, begin))
        for chain in chains.values()
        for event, following in pairwise(chain)
        if begin <= event["ts"]
        and following["ts"] <= end
        and {(each["pid"], each["tid"]) for each in (event, following)} <= set(lanes)
    ]
    times = [begin + (end - begin) * mark / (MARKS - 1) for mark in range(MARKS)]
    marks = [(time - begin, f"{time / 1e3:.4g} ms") for time in times]
    rows = [SpanRow(f"rank {lane[0]}  {names[lane]}", spans[lane]) for lane in lanes]
    title = f"{Path(source).name}, {first} to {last} ms"
    Path(target).write_text(draw_spans(rows, title, WIDTH / (end - begin), marks, arrows))


def _place(event: Event, lanes: list[tuple[int, int]], begin: float) -> Place:
    return Place(lanes.index((event["pid"], event["tid"])), event["ts"] - begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
