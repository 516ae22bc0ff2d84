"""SVG documents: text stays text, in one typeface, and colors follow the reader's light or dark scheme.

What is drawn in `currentColor` is dark on a light page and light on a dark one; bands and lines are shades of it.

Drawn are spans in rows, time from left to right, also as text: a step that was predicted, threads that were timed, or
the messages of a schedule.

    main           f0··f1··b0··b1······b2······
    update                             p1 s1 u1        a box has a label; its color distinguishes kinds of work
    communication              w0··        a1······
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

INK, PAPER = "#24292f", "#ffffff"
"""Colors of text and page in the light scheme."""

FONTS = ("DejaVu Sans", "Verdana", "sans-serif")
"""Typeface: two with characters of one width, and what there is."""

MARGIN, FONT_SIZE = 20.0, 12.0
"""Empty border of a page, and size of text, in SVG units."""

TITLE_HEIGHT = 26.0
"""Height of the title under the upper border, in SVG units."""

CHARACTER_WIDTH = 7.4
"""Width of a character of usual text at most, in SVG units."""

COLORS = ("#0a76c4", "#d9600a", "#0f9960", "#c2589b", "#a5840b", "#7a6fd0", "#2f9fb0", "#cf4b4b")
"""Colors that differ for most forms of color vision, and are readable on white and on black."""

STYLE = f"""<style>
svg {{ color: {INK} }}
.page {{ fill: {PAPER} }}
@media (prefers-color-scheme: dark) {{
  svg {{ color: #e6edf3 }}
  .page {{ fill: #0d1117 }}
}}
</style>
<rect class="page" width="100%" height="100%" fill="{PAPER}"/>"""
"""Colors of the schemes, and the page."""


def element(name: str, *content: str, **attributes: str | float) -> str:
    """Return an element with `content`, which is SVG. Hyphens of attributes are written as underscores.

    >>> element("path", d="M0,0 H9", stroke_width=1.50)
    '<path d="M0,0 H9" stroke-width="1.5"/>'
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(value if isinstance(value, str) else f'{value:g}')}"
        for key, value in attributes.items()
    )
    inside = "\n".join(content)
    return f"<{name}{given}>{inside}</{name}>" if content else f"<{name}{given}/>"


def text(x: float, y: float, content: str, **attributes: str | float) -> str:
    """Return a line of text with its baseline at `y`."""
    return element("text", escape(content), x=x, y=y, **attributes)


def box(x: float, y: float, width: float, height: float, **attributes: str | float) -> str:
    """Return a rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, **attributes)


ARROW_HEAD = (
    '<marker id="head" orient="auto" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="7" markerHeight="7">'
    '<path d="M0,1 L8,4 L0,7 z"/></marker>'
)
"""Head of arrows, once in a document that has any."""


def width_of(content: str) -> float:
    """Return an upper bound of the width of usual text, in SVG units."""
    return CHARACTER_WIDTH * len(content)


def legend(colors: Mapping[str, str], y: float) -> list[str]:
    """Return a box of each color with its meaning, side by side on a line at `y`."""
    x, drawn = MARGIN, list[str]()
    for meaning, color in colors.items():
        drawn += [box(x, y - 6, 12, 12, rx=2, fill=color), text(x + 18, y + 4, meaning)]
        x += 34 + width_of(meaning)
    return drawn


def page(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """Return a document with a title, which readers without the drawing get too."""
    width = max(width, 2 * MARGIN + 15 / FONT_SIZE * width_of(title))
    heading = text(MARGIN, MARGIN + 12, title, font_size=15, font_weight="bold")
    content = "\n".join([element("title", escape(title)), STYLE, heading, *body])
    size: dict[str, str | float] = {"width": width, "height": height, "viewBox": f"0 0 {width:g} {height:g}"}
    font: dict[str, str | float] = {"font_family": ", ".join(FONTS), "font_size": FONT_SIZE}
    look = {"role": "img", **font, "fill": "currentColor", "color": INK}
    document = element("svg", f"\n{content}\n", xmlns="http://www.w3.org/2000/svg", **size, **look)
    return f"{document}\n"


ROW, GAP = 30.0, 6.0
"""Height of a row, and space in it under the boxes, in SVG units."""

UNIT = 34.0
"""Width of a unit of time, in SVG units."""

KIND_COLORS = (
    *("#9ecae1", "#fd8d3c", "#6baed6", "#74c476", "#dadaeb"),
    *("#bcbddc", "#fdae6b", "#c7e9c0", "#e7969c", "#cedb9c"),
)
"""Colors of kinds of work, on all of which dark text is readable."""

COLUMNS = 4
"""Characters of text per unit of time."""


class Span(NamedTuple):
    """Work from a begin to an end."""

    begin: float
    end: float
    label: str
    kind: str
    tooltip: str
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
    unit: float = UNIT,
    marks: Sequence[tuple[float, str]] = (),
    arrows: Sequence[tuple[Place, Place]] = (),
) -> str:
    """Return the rows as an SVG document; a unit of time is `unit` SVG units wide.

    `marks` are times and words under them. Labels are left out where the box has no room for them.
    """
    spans = [span for row in rows for span in row.spans]
    kinds = dict.fromkeys(span.kind for span in sorted(spans, key=lambda span: span.begin))
    colors = {kind: KIND_COLORS[index % len(KIND_COLORS)] for index, kind in enumerate(kinds)}
    left, top = MARGIN + max((width_of(row.name) for row in rows), default=0.0) + 12, MARGIN + TITLE_HEIGHT + 32
    bottom = top + ROW * len(rows)
    body = legend(colors, top - 24)
    for time, label in marks:
        x = left + time * unit
        body.append(element("path", d=f"M{x:g},{top:g} V{bottom:g}", stroke="currentColor", stroke_opacity=0.2))
        body.append(text(x, bottom + 12, label, text_anchor="middle"))
    for index, row in enumerate(rows):
        y = top + ROW * index
        body += [text(MARGIN, y + ROW / 2 + 1, row.name)] if row.name else []
        body += [_box(span, left + span.begin * unit, y, unit, colors[span.kind]) for span in row.spans]
    body += [ARROW_HEAD] * bool(arrows)
    look: dict[str, str | float] = {"stroke": "currentColor", "stroke_width": 1.4, "fill": "none"}
    for ends in arrows:
        (x, y), (to_x, to_y) = ((left + end.time * unit, top + ROW * (end.row + 0.5) - GAP / 2) for end in ends)
        body.append(element("path", d=f"M{x:g},{y:g} L{to_x:g},{to_y:g}", **look, marker_end="url(#head)"))
    right = left + unit * max((span.end for span in spans), default=0.0)
    return page(right + MARGIN, bottom + MARGIN, title, body)


def _box(span: Span, x: float, y: float, unit: float, color: str) -> str:
    width = max(1.0, (span.end - span.begin) * unit - 1)
    label = [text(x + 4, y + ROW / 2 + 1, span.label, font_size=11, fill=INK)] if width > 6 * len(span.label) else []
    return element("g", element("title", escape(span.tooltip)), box(x, y, width, ROW - GAP, rx=2, fill=color), *label)
