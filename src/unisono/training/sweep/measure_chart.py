"""Chart of test accuracy or perplexity against time, a line for each run, with its label at its end.

accuracy
│       ╭───────●──── every=4        Labels keep their distance: a thin line leads from the end of a run
│   ╭───╯  ╭──●──╮                   to its label.
│  ╱   ╭───╯     ╰─── every=1
└──────────────── time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from unisono.training.curves import Curve
from unisono.training.measures import ACCURACY, Measure
from unisono.training.sweep.svg import FONT_SIZE, LINE_HEIGHT, MARGIN, page, text, ticks, width_of

WIDTH, MIN_HEIGHT = 640.0, 320.0
"""Size of the area of the lines, in SVG units; it grows with the number of labels."""

LEADER = 40.0
"""Width of the lines between the area and the labels, in SVG units."""

MAX_DOTS = 60
"""Epochs of a run above which they get no dots."""

COLORS = ("#0a76c4", "#d9600a", "#0f9960", "#c2589b", "#a5840b", "#7a6fd0", "#2f9fb0", "#cf4b4b")
"""Colors that differ for most forms of color vision, and are readable on white and on black."""

DASHES = ("", "7 3", "2 3", "9 3 2 3")

UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


class _Area(NamedTuple):
    """Place of the lines on the page, and the numbers at its edges."""

    left: float
    top: float
    height: float
    longest: float
    low: float
    high: float

    def x(self, time: float) -> float:
        return self.left + WIDTH * time / self.longest

    def y(self, value: float) -> float:
        return self.top + self.height * (self.high - value) / (self.high - self.low)


def draw_measure(curves: Sequence[Curve], title: str) -> str:
    """Return the curves, of one measure, as an SVG document. Each has one epoch at least, and its name is its label."""
    seconds, unit = _unit(max(curve.seconds[-1] for curve in curves))
    across = ticks(0.0, max(curve.seconds[-1] for curve in curves) / seconds)
    measure, values = curves[0].measure, [value for curve in curves for value in curve.values]
    up = _ticks(min(values), max(values), measure)
    names = _names(up, measure)
    height = max(MIN_HEIGHT, LINE_HEIGHT * len(curves))
    left = MARGIN + max(map(width_of, names)) + 8
    area = _Area(left, MARGIN + 3 * LINE_HEIGHT, height, across[-1] * seconds, up[0], up[-1])
    times = [(time * seconds, f"{time:g}") for time in across]
    body = [*_axes(area, measure.title, up, names, times, unit), *_lines(area, curves)]
    right = area.left + WIDTH + LEADER + max(width_of(curve.name) for curve in curves) + MARGIN
    width = max(right, 2 * MARGIN + width_of(title))
    return page(width, area.top + height + 3 * LINE_HEIGHT + MARGIN, title, body)


def _unit(longest: float) -> tuple[float, str]:
    """Return the seconds of a unit of time, and its name."""
    return next((unit for unit in UNITS if longest >= 2 * unit[0]), UNITS[-1])


def _ticks(low: float, high: float, measure: Measure) -> list[float]:
    """Return ticks around two values; those of close accuracies are a tenth of a percent apart at least."""
    least = 0.005 * min(measure.most, max(1.0, high))
    if high - low < least:
        low, high = max(0.0, low - least / 2), min(measure.most, high + least / 2)
    return [value for value in ticks(low, high) if -1e-9 <= value <= measure.most + 1e-9]


def _names(up: Sequence[float], measure: Measure) -> list[str]:
    """Return the numbers at ticks, with as many digits as their distance needs."""
    if measure is not ACCURACY:
        return [f"{value:g}" for value in up]
    digits = 0 if up[1] - up[0] > 0.00999 else 1 if up[1] - up[0] > 0.000999 else 2
    return [f"{value:.{digits}%}" for value in up]


def _axes(
    area: _Area, title: str, up: Sequence[float], names: Sequence[str], across: Sequence[tuple[float, str]], unit: str
) -> list[str]:
    bottom = area.top + area.height
    drawn = [text(MARGIN, area.top - LINE_HEIGHT, title)]
    for value, name in zip(up, names, strict=True):
        y = area.y(value)
        drawn.append(f'<path class="rule" d="M{area.left:.1f},{y:.1f} h{WIDTH:.1f}"/>')
        drawn.append(text(area.left - 8, y + 4, name, "end"))
    for seconds, name in across:
        x = area.x(seconds)
        drawn.append(f'<path class="rule" d="M{x:.1f},{bottom:.1f} v5"/>')
        drawn.append(text(x, bottom + LINE_HEIGHT + 4, name, "middle"))
    drawn.append(text(area.left + WIDTH / 2, bottom + 2 * LINE_HEIGHT + 8, f"time ({unit})", "middle"))
    return drawn


def _lines(area: _Area, curves: Sequence[Curve]) -> list[str]:
    ends = [area.y(curve.values[-1]) for curve in curves]
    labels = spread(ends, LINE_HEIGHT, area.top, area.top + area.height)
    drawn = []
    for number, (curve, end, label) in enumerate(zip(curves, ends, labels, strict=True)):
        color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        points = [(area.x(time), area.y(value)) for time, value in zip(curve.seconds, curve.values, strict=True)]
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        drawn.append(f'<g stroke="{color}" fill="none"><title>{escape(curve.name)}</title>')
        drawn.append(f'<path d="M{path}" stroke-width="2" stroke-linejoin="round"{dashes}/>')
        leader = f"M{points[-1][0]:.1f},{end:.1f} L{area.left + WIDTH:.1f},{end:.1f}"
        drawn.append(f'<path d="{leader} l{LEADER - 6:.1f},{label - end:.1f}" stroke-width="0.8" opacity="0.6"/>')
        if len(points) <= MAX_DOTS:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in points]
        drawn.append("</g>")
        drawn.append(text(area.left + WIDTH + LEADER, label + FONT_SIZE / 3, curve.name, attributes=f'fill="{color}"'))
    return drawn


def spread(wanted: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Return positions in the order of `wanted`, close to them, between `low` and `high`, at least `distance` apart.

    They are only as far apart as the extent allows where it has no room for all.

    >>> spread([5.0, 5.0, 30.0], 10.0, 0.0, 40.0)
    [5.0, 15.0, 30.0]
    """
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    distance = min(distance, (high - low) / max(1, len(order) - 1))
    found = dict.fromkeys(order, low)
    least = low
    for number in order:
        found[number] = max(wanted[number], least)
        least = found[number] + distance
    most = high
    for number in reversed(order):
        found[number] = min(found[number], most)
        most = found[number] - distance
    return [found[number] for number in range(len(wanted))]
