"""Heat maps of the final test accuracy or perplexity over two swept keys, one for each combination of the others.

every
         ┌────────┬────────┐
      1  │ 96.11% │ 97.22% │    The first swept key goes down, the second across. Cells of several seeds have
         ├────────┼────────┤    their mean.
      4  │ 95.28% │   –    │
         └────────┴────────┘
            0.05      0.1
         learning_rate
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from unisono.training.measures import Measure
from unisono.training.sweep.plan import Grid
from unisono.training.sweep.report import SEED, RunResult
from unisono.training.sweep.svg import FONT_SIZE, LINE_HEIGHT, MARGIN, page, text, width_of

MAX_PAGE_WIDTH = 1000.0
"""Largest width of a row of heat maps, in SVG units, unless one alone is wider."""

CELL_HEIGHT, GAP = 34.0, 10.0
"""Height of a cell, and distance between texts and cells, in SVG units."""

COLORS = ((232, 241, 250), (107, 174, 214), (11, 79, 158))
"""Red, green and blue of the worst, the middle and the best value."""

LIGHT_INK, DARK_INK = "#ffffff", "#06101c"
"""Colors of the numbers in cells."""

LEGEND_STEPS, LEGEND_STEP = 20, 8.0
"""Number of rectangles of the legend, and width of each in SVG units."""


class HeatMap(NamedTuple):
    """Values of a measure over two keys."""

    title: str
    """Values of the other swept keys; empty where there are none."""
    keys: tuple[str, str]
    """Names of the keys that go down and across."""
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    """Values by row and column; None where no run has ended, infinite where one has diverged."""


class _HeatMapPanel(NamedTuple):
    width: float
    height: float
    body: list[str]


class _Scale(NamedTuple):
    """Values at the ends of the scale of colors."""

    measure: Measure
    worst: float
    best: float

    def share(self, value: float) -> float:
        """Return the place of a value between the worst, 0, and the best, 1."""
        return (value - self.worst) / (self.best - self.worst) if self.best != self.worst else 1.0


def heat_maps(grid: Grid, results: Sequence[RunResult]) -> list[HeatMap]:
    """Return the heat maps of a sweep: none where less than two keys are swept.

    Where the seed is swept with at least two other keys, cells have the mean over seeds.
    """
    short, keys = grid.short_keys, [axis.key for axis in grid.swept]
    shown = [number for number, key in enumerate(keys) if key != SEED or len(keys) == 2]
    if len(shown) < 2:
        return []
    down, across, *others = shown
    groups: defaultdict[str, defaultdict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        values = result.point.values
        cells = groups[", ".join(f"{short[keys[number]]} = {values[number]}" for number in others)]
        if result.final is not None:
            cells[values[down], values[across]].append(result.final.value)
    rows, columns = grid.swept[down].values, grid.swept[across].values
    names = short[keys[down]], short[keys[across]]
    found = []
    for title, cells in groups.items():
        means = tuple(tuple(_mean(cells[row, column]) for column in columns) for row in rows)
        found.append(HeatMap(title, names, rows, columns, means))
    return found


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def draw_heat_maps(maps: Sequence[HeatMap], measure: Measure, title: str) -> str:
    """Return heat maps of a measure as an SVG document; all have the same scale of colors, best values the darkest."""
    known = [cell for drawn in maps for row in drawn.cells for cell in row if cell is not None and math.isfinite(cell)]
    scale = _Scale(measure, min(known, key=measure.merit, default=0.0), max(known, key=measure.merit, default=0.0))
    body, legend_width = _legend(scale)
    x, y = MARGIN, MARGIN + 4 * LINE_HEIGHT + GAP
    below, width = y, max(2 * MARGIN + width_of(title), legend_width)
    for panel in (_panel(drawn, scale) for drawn in maps):
        if x > MARGIN and x + panel.width + MARGIN > MAX_PAGE_WIDTH:
            x, y = MARGIN, below
        body += [f'<g transform="translate({x:.1f},{y:.1f})">', *panel.body, "</g>"]
        x += panel.width + 2 * MARGIN
        width, below = max(width, x - MARGIN), max(below, y + panel.height + MARGIN)
    return page(width, below, title, body)


def _legend(scale: _Scale) -> tuple[list[str], float]:
    """Return the scale of colors from the worst to the best value, and the width of the page up to its end."""
    words = scale.measure.words
    y, worst, best = MARGIN + FONT_SIZE + 1.5 * LINE_HEIGHT, words(scale.worst), words(scale.best)
    start = MARGIN + width_of(worst) + GAP
    drawn = [text(MARGIN, y, worst)]
    for number in range(LEGEND_STEPS):
        color = color_of(number / (LEGEND_STEPS - 1))
        x = start + LEGEND_STEP * number
        drawn.append(f'<rect x="{x:.1f}" y="{y - 11:.1f}" width="{LEGEND_STEP + 0.5:.1f}" height="14" fill="{color}"/>')
    end = start + LEGEND_STEPS * LEGEND_STEP + GAP
    return [*drawn, text(end, y, best)], end + width_of(best) + MARGIN


def _panel(drawn: HeatMap, scale: _Scale) -> _HeatMapPanel:
    """Return a heat map with its upper left corner at (0, 0)."""
    left = max(width_of(row) for row in drawn.rows) + GAP
    shown = [scale.measure.words(value) for row in drawn.cells for value in row if value is not None]
    cell = GAP + max(map(width_of, ("100.00%", *shown, *drawn.columns)))
    y = FONT_SIZE
    body = []
    if drawn.title:
        body.append(text(0, y, drawn.title, attributes='font-weight="bold"'))
        y += LINE_HEIGHT + 2
    body.append(text(0, y, drawn.keys[0]))
    top = y + GAP
    for number, row in enumerate(drawn.rows):
        upper = top + CELL_HEIGHT * number
        body.append(text(left - GAP, upper + CELL_HEIGHT / 2 + 4, row, "end"))
        for place, value in enumerate(drawn.cells[number]):
            body += _cell(left + cell * place, upper, cell, value, scale)
    y = top + CELL_HEIGHT * len(drawn.rows) + LINE_HEIGHT
    for number, column in enumerate(drawn.columns):
        body.append(text(left + cell * (number + 0.5), y, column, "middle"))
    y += LINE_HEIGHT + 2
    body.append(text(left, y, drawn.keys[1]))
    right = left + max(cell * len(drawn.columns), width_of(drawn.keys[1]))
    return _HeatMapPanel(max(right, width_of(drawn.title), width_of(drawn.keys[0])), y + GAP, body)


def _cell(x: float, y: float, width: float, value: float | None, scale: _Scale) -> list[str]:
    box = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{CELL_HEIGHT - 1:.1f}"'
    middle, base = x + width / 2, y + CELL_HEIGHT / 2 + 4
    if value is None or not math.isfinite(value):
        words = "–" if value is None else scale.measure.words(value)
        return [f'{box} class="empty"/>', text(middle, base, words, "middle")]
    share = scale.share(value)
    ink = LIGHT_INK if share > 0.75 else DARK_INK
    return [
        f'{box} fill="{color_of(share)}"/>',
        text(middle, base, scale.measure.words(value), "middle", f'fill="{ink}"'),
    ]


def color_of(share: float) -> str:
    """Return the color of a place between the worst (0) and the best (1) value."""
    start, end = (COLORS[0], COLORS[1]) if share < 0.5 else (COLORS[1], COLORS[2])
    part = 2 * share if share < 0.5 else 2 * share - 1
    red, green, blue = (round(low + part * (high - low)) for low, high in zip(start, end, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
