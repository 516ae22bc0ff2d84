"""SVG documents: text stays text, in one typeface, and colors follow the reader's light or dark scheme.

What is drawn in `currentColor` is dark on a light page and light on a dark one; bands and lines are shades of it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    line = "\n"
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(value if isinstance(value, str) else f'{value:g}')}"
        for key, value in attributes.items()
    )
    return f"<{name}{given}>{line.join(content)}</{name}>" if content else f"<{name}{given}/>"


def text(x: float, y: float, words: str, **attributes: str | float) -> str:
    """Return a line of text with its baseline at `y`."""
    return element("text", escape(words), x=x, y=y, **attributes)


def box(x: float, y: float, width: float, height: float, **attributes: str | float) -> str:
    """Return a rectangle."""
    return element("rect", x=x, y=y, width=width, height=height, **attributes)


def arrow(x: float, y: float, to_x: float, to_y: float, head: str, color: str) -> str:
    """Return an arrow with the head that `arrow_head` makes by this name."""
    line = f"M{x:g},{y:g} L{to_x:g},{to_y:g}"
    return element("path", d=line, stroke=color, stroke_width=1.4, fill="none", marker_end=f"url(#{head})")


def arrow_head(name: str, color: str) -> str:
    """Return the head of arrows in a color."""
    shape = element("path", d="M0,1 L8,4 L0,7 z", fill=color)
    place = {"viewBox": "0 0 8 8", "refX": "7.5", "refY": "4", "markerWidth": "7", "markerHeight": "7"}
    return element("marker", shape, id=name, orient="auto", **place)


def width_of(words: str) -> float:
    """Return an upper bound of the width of usual text, in SVG units."""
    return CHARACTER_WIDTH * len(words)


class LegendEntry(NamedTuple):
    """Symbol, drawn on a line at y = 0 from x = 0 on, its width, and its meaning."""

    symbol: Sequence[str]
    width: float
    words: str


def legend(entries: Sequence[LegendEntry], y: float) -> list[str]:
    """Return symbols with their meanings side by side, on a line at `y`."""
    x, drawn = MARGIN, list[str]()
    for entry in entries:
        words = text(entry.width + 6, 4, entry.words)
        drawn.append(element("g", *entry.symbol, words, transform=f"translate({x:g},{y:g})"))
        x += entry.width + 6 + width_of(entry.words) + 16
    return drawn


def page(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """Return a document with a title, which readers without the drawing get too."""
    width = max(width, 2 * MARGIN + 15 / FONT_SIZE * width_of(title))
    content = [
        element("title", escape(title)),
        STYLE,
        text(MARGIN, MARGIN + 12, title, font_size=15, font_weight="bold"),
        *body,
    ]
    return (
        element(
            "svg",
            "\n" + "\n".join(content) + "\n",
            xmlns="http://www.w3.org/2000/svg",
            width=width,
            height=height,
            viewBox=f"0 0 {width:g} {height:g}",
            role="img",
            font_family=", ".join(FONTS),
            font_size=FONT_SIZE,
            fill="currentColor",
            color=INK,
        )
        + "\n"
    )
