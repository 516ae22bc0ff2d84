"""Pages and text of SVG diagrams: text stays text, and colors follow the reader's light or dark scheme."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from xml.sax.saxutils import escape

MARGIN = 20.0
"""Empty border of a page, in SVG units."""

FONT_SIZE, LINE_HEIGHT = 12.0, 16.0
"""Size of text, and least distance between two lines of it, in SVG units."""

CHARACTER_WIDTH = 7.4
"""Upper bound of the width of a character, in SVG units: monospace fonts have 0.6 of FONT_SIZE."""

STYLE = """\
.chart { fill: #24292f; font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 12px }
.page { fill: #ffffff }
.empty { fill: #eaeef2 }
.rule { stroke: #d0d7de; fill: none }
@media (prefers-color-scheme: dark) {
  .chart { fill: #e6edf3 }
  .page { fill: #0d1117 }
  .empty { fill: #21262d }
  .rule { stroke: #3d444d }
}"""


def width_of(words: str) -> float:
    """Return an upper bound of the width of a text, in SVG units."""
    return CHARACTER_WIDTH * len(words)


def text(x: float, y: float, words: str, anchor: str = "start", attributes: str = "") -> str:
    """Return a line of text with its baseline at `y`; `anchor` is start, middle or end."""
    more = f" {attributes}" if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def page(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """Return an SVG document with a title, which readers without the drawing get too."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} class="chart" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        text(MARGIN, MARGIN + FONT_SIZE, title, attributes='font-weight="bold"'),
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten: the first is at most `low`, the last at least
    `high`.

    >>> ticks(0.0, 9.3)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    rough = (high - low) / count
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    digits = max(0, 1 - floor(log10(step)))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(number * step, digits) for number in range(first, last + 1)]
