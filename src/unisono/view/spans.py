"""Spans in rows, time from left to right, as text and as SVG: a step that was predicted, or threads that were timed.

main           f0··f1··b0··b1······b2······
update                             p1 s1 u1        a box has a label; its color distinguishes kinds of work
communication              w0··        a1······
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from unisono.view.svg import (
    INK,
    MARGIN,
    TITLE_HEIGHT,
    LegendEntry,
    arrow,
    arrow_head,
    box,
    element,
    legend,
    page,
    text,
    width_of,
)

ROW, GAP = 30.0, 6.0
"""Height of a row, and space in it under the boxes, in SVG units."""

COLORS = ("#9ecae1", "#6baed6", "#fd8d3c", "#74c476", "#dadaeb", "#bcbddc", "#fdae6b", "#c7e9c0", "#e7969c", "#cedb9c")
"""Colors of kinds of work, on all of which dark text is readable."""

COLUMNS = 4
"""Characters of text per unit of time."""


class Span(NamedTuple):
    """Work from a begin to an end."""

    begin: float
    end: float
    label: str
    kind: str
    words: str
    """Name and times, shown where a reader points at the box."""


class SpanRow(NamedTuple):
    """Spans, of which none crosses another, and the name at the left."""

    name: str
    spans: Sequence[Span]


class Place(NamedTuple):
    """Point in a drawing: the number of a row, and a time."""

    row: int
    time: float


def draw_text(rows: Sequence[SpanRow]) -> list[str]:
    """Return a line of text for each row."""
    width = max((len(row.name) for row in rows), default=0)
    return [f"{row.name:>{width}} │{_line(row.spans)}" for row in rows]


def _line(spans: Iterable[Span]) -> str:
    line = ""
    for span in spans:
        first, last = (round(time * COLUMNS) for time in (span.begin, span.end))
        label = span.label.ljust(last - first, "·")
        line = line.ljust(first) + label[: max(1, last - first - 1)]
    return line


def draw_spans(
    rows: Sequence[SpanRow],
    title: str,
    unit: float,
    marks: Sequence[tuple[float, str]] = (),
    arrows: Sequence[tuple[Place, Place]] = (),
) -> str:
    """Return the rows as an SVG document; a unit of time is `unit` SVG units wide.

    `marks` are times and words under them. Labels are left out where the box has no room for them.
    """
    spans = [span for row in rows for span in row.spans]
    kinds = dict.fromkeys(span.kind for span in sorted(spans, key=lambda span: span.begin))
    colors = {kind: COLORS[number % len(COLORS)] for number, kind in enumerate(kinds)}
    left, top = MARGIN + max((width_of(row.name) for row in rows), default=0.0) + 12, MARGIN + TITLE_HEIGHT + 32
    bottom = top + ROW * len(rows)
    body = legend([LegendEntry([box(0, -6, 12, 12, rx=2, fill=colors[kind])], 12, kind) for kind in kinds], top - 24)
    for time, words in marks:
        x = left + time * unit
        body.append(element("path", d=f"M{x:g},{top:g} V{bottom:g}", stroke="currentColor", stroke_opacity=0.2))
        body.append(text(x, bottom + 12, words, text_anchor="middle"))
    for number, row in enumerate(rows):
        y = top + ROW * number
        body += [text(MARGIN, y + ROW / 2 + 1, row.name)] if row.name else []
        body += [_box(span, left + span.begin * unit, y, unit, colors[span.kind]) for span in row.spans]
    body += [arrow_head("arrow", INK)] * bool(arrows)
    for ends in arrows:
        (x, y), (to_x, to_y) = ((left + end.time * unit, top + ROW * (end.row + 0.5) - GAP / 2) for end in ends)
        body.append(arrow(x, y, to_x, to_y, "arrow", INK))
    right = left + unit * max((span.end for span in spans), default=0.0)
    return page(right + MARGIN, bottom + MARGIN, title, body)


def _box(span: Span, x: float, y: float, unit: float, color: str) -> str:
    width = max(1.0, (span.end - span.begin) * unit - 1)
    words = [text(x + 4, y + ROW / 2 + 1, span.label, font_size=11, fill=INK)] if width > 6 * len(span.label) else []
    return element("g", element("title", escape(span.words)), box(x, y, width, ROW - GAP, rx=2, fill=color), *words)
