"""Curves of a measure over time and over epochs, for one or more runs (as in DIMD's figures 13 and 14).

accuracy                         accuracy
│      ╭──── other               │      ╭──── other
│   ╭──╯ ╭── one                 │   ╭──╯ ╭── one
│  ╱  ╭──╯                       │  ╱  ╭──╯
└──────────── minutes            └──────────── epochs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.view.chart import color_of, render
from unisono.view.svg import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

STYLES = ("-", "--", "-.", ":")
"""Lines of runs that share a color."""

MAX_DOTS = 60
"""Epochs of a run above which they get no dots."""

LEGEND_ROW = 0.2
"""Height of a row of the legend, in inches."""


class Line(NamedTuple):
    """Values of a run after each of its epochs."""

    name: str
    epochs: Sequence[int]
    seconds: Sequence[float]
    """Seconds since the run began."""
    values: Sequence[float]
    beside: bool = False
    """True for a second measure of the run before, which has its color and is dotted."""


def draw_curves(lines: Sequence[Line], measure: str, percent: bool, title: str = "", form: str = "svg") -> bytes:
    """Return the picture of lines of one measure, over time beside over epochs. Each has one epoch at least."""
    longest = max(line.seconds[-1] for line in lines)
    seconds, unit = next((unit for unit in UNITS if longest >= 2 * unit[0]), UNITS[-1])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        number = -1
        for line in lines:
            number += not line.beside
            style = ":" if line.beside else STYLES[number // len(COLORS) % len(STYLES)]
            look = {"color": color_of(number), "linestyle": style, "label": line.name}
            marker = "." if len(line.epochs) <= MAX_DOTS else ""
            left.plot([second / seconds for second in line.seconds], line.values, marker=marker, **look)
            right.plot(line.epochs, line.values, marker=marker, **look)
        left.set(xlabel=unit, ylabel=measure, xlim=(0, None))
        right.set(xlabel="epochs", xlim=(0, None))
        right.xaxis.get_major_locator().set_params(integer=True)
        if percent:
            left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g}%")
        figure.suptitle(title, x=0.01, ha="left")
        named = zip(*right.get_legend_handles_labels(), strict=True)
        from_top = [pair for _, pair in sorted(zip(lines, named, strict=True), key=lambda pair: -pair[0].values[-1])]
        figure.legend(*zip(*from_top, strict=True), loc="outside right upper")

    return render(draw, 12, max(4.5, LEGEND_ROW * len(lines) + 1), form)
