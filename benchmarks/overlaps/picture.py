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
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans = defaultdict[tuple[int, int], list[Span]](list)
    for one in sorted(events, key=lambda one: -one.get("dur", 0)):  # what lies within another is drawn over it
        if one["ph"] == "X" and one["ts"] < end and one["ts"] + one["dur"] > begin:
            left, right = max(one["ts"], begin) - begin, min(one["ts"] + one["dur"], end) - begin
            words = f"{one['name']}: {one['dur'] / 1e3:.3f} ms"
            kind = one["name"].partition(" ")[0]
            spans[one["pid"], one["tid"]].append(Span(left, right, one["name"], kind, words))
    lanes = sorted(spans)
    chains: defaultdict[str, list[Event]] = defaultdict(list)
    for one in events:
        if one["ph"] in "stf":
            chains[one["id"]].append(one)
    arrows = [
        (_place(one, lanes, begin), _place(other, lanes, begin))
        for chain in chains.values()
        for one, other in pairwise(chain)
        if begin <= one["ts"] and other["ts"] <= end and {(at["pid"], at["tid"]) for at in (one, other)} <= set(lanes)
    ]
    times = [begin + (end - begin) * number / (MARKS - 1) for number in range(MARKS)]
    marks = [(time - begin, f"{time / 1e3:.4g} ms") for time in times]
    rows = [SpanRow(f"rank {lane[0]}  {names[lane]}", spans[lane]) for lane in lanes]
    title = f"{Path(source).name}, {first} to {last} ms"
    Path(target).write_text(draw_spans(rows, title, WIDTH / (end - begin), marks, arrows))


def _place(event: Event, lanes: list[tuple[int, int]], begin: float) -> Place:
    return Place(lanes.index((event["pid"], event["tid"])), event["ts"] - begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
