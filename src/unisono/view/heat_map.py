"""Heat maps: a cell for each row and column, with its value in words on the color of its share.

every
         ┌────────┬────────┐
      1  │ 96.11% │ 97.22% │
         ├────────┼────────┤
      4  │ 95.28% │   –    │
         └────────┴────────┘
            0.05      0.1
         learning_rate
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.view.chart import render
from unisono.view.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LIGHT, DARK = "#ffffff", "#06101c"
"""Colors of the words in cells."""

SEQUENTIAL, DIVERGING = "Blues", "RdYlGn_r"
"""Names of scales of colors: from light to dark, and from good over even to bad."""

CHARACTER, CELL_HEIGHT = 0.085, 0.34
"""Width of a character and height of a cell, in inches."""

MAX_WIDTH = 12.0
"""Width of a row of heat maps, in inches, unless one alone is wider."""


class HeatCell(NamedTuple):
    """Value of a row and a column."""

    text: str
    share: float | None = None
    """Place on the scale of colors, 0 to 1; None has no color."""


class HeatMap(NamedTuple):
    """Cells, by row and column."""

    title: str
    keys: tuple[str, str]
    """Names of what goes down and across."""
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[HeatCell]]
    ends: Sequence[str] = ()
    """Words at the ends of the rows."""

    @property
    def longest(self) -> int:
        """Characters of the longest words in a cell or a level name of a column."""
        names = () if self.upright else self.columns
        return max(5, *(len(cell.text) for row in self.cells for cell in row), *map(_longest_line, names))

    @property
    def upright(self) -> bool:
        """True where names of columns are read upwards: they are much longer than what is in the cells."""
        longest = max(len(cell.text) for row in self.cells for cell in row)
        return max(map(_longest_line, self.columns)) > max(8, longest + 4)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        sides = max(map(len, (*self.rows, self.keys[0]))) + max(map(len, self.ends), default=0)
        cells = (self.longest + 2) * CHARACTER * len(self.columns)
        head = CHARACTER * max(map(len, self.columns)) if self.upright else 0.0
        width = max(cells, 1.2 * CHARACTER * len(self.title))
        return max(width + CHARACTER * sides + 0.6, 3.0), CELL_HEIGHT * len(self.rows) + head + 1.0


def _longest_line(text: str) -> int:
    return max(map(len, text.split("\n")))


def draw_heat_maps(maps: Sequence[HeatMap], title: str, scale: str = SEQUENTIAL) -> bytes:
    """Return the picture of heat maps side by side, as SVG."""
    widths, heights = zip(*(drawn.size for drawn in maps), strict=True)
    across = min(len(maps), max(1, int(MAX_WIDTH / max(widths))))
    down = -(-len(maps) // across)

    def draw(figure: Figure) -> None:
        panes = figure.subplots(down, across, squeeze=False).flatten()
        for axes, drawn in zip(panes, maps, strict=False):
            _draw(axes, drawn, scale)
        for axes in panes[len(maps) :]:
            axes.set_axis_off()
        figure.suptitle(title, x=0.01, ha="left")

    return render(draw, max(across * max(widths), CHARACTER * len(title) * 1.2), down * max(heights) + 0.3)


def _draw(axes: Axes, drawn: HeatMap, scale: str) -> None:
    from matplotlib import colormaps  # noqa: PLC0415  only who draws needs it

    shares = [[math.nan if cell.share is None else cell.share for cell in row] for row in drawn.cells]
    axes.pcolormesh(shares, cmap=scale, vmin=0, vmax=1, edgecolors="none")
    for y, row in enumerate(drawn.cells):
        for x, cell in enumerate(row):
            dark = cell.share is not None and _luminance(colormaps[scale](cell.share)) < 0.18
            color = INK if cell.share is None else LIGHT if dark else DARK
            axes.text(x + 0.5, y + 0.5, cell.text, ha="center", va="center", fontsize=9, color=color)
    axes.set_title(drawn.title)
    axes.set(xlabel=drawn.keys[1], ylabel=drawn.keys[0], ylim=(len(drawn.rows), 0))
    axes.set_xticks([x + 0.5 for x in range(len(drawn.columns))], drawn.columns, rotation=90 if drawn.upright else 0)
    axes.set_yticks([y + 0.5 for y in range(len(drawn.rows))], drawn.rows)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if drawn.ends:
        right = axes.secondary_yaxis("right")
        right.set_yticks([y + 0.5 for y in range(len(drawn.rows))], drawn.ends)
        right.tick_params(length=0)
        right.spines[:].set_visible(False)


def _luminance(color: Sequence[float]) -> float:
    """Return the relative luminance of a color, as WCAG defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color[:3]]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
