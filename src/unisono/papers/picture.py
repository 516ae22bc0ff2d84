"""A picture of a figure: theirs beside ours, in a panel for each unit.

    images/s   theirs      ▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬         s   2 learners   ▬▬▬▬▬▬▬▬▬▬▬▬▬├─┤
               predicted   ▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬          4 learners   ▬▬▬▬▬▬▬├┤

Bars of a row are theirs, and ours predicted and measured where they are comparable; below are all measured rows of the
unit, with their ranges.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from unisono.papers.figures import PaperFigure
from unisono.papers.report import measured_of, number
from unisono.view.chart import color_of, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

KINDS = ("theirs", "predicted, nothing fitted", "predicted, with theirs", "measured here")

LOGARITHMIC = 100
"""Ratio of the largest to the smallest value of a panel from which its scale is logarithmic."""

BAR = 0.24
"""Height of a bar, in inches."""


class ValueBar(NamedTuple):
    name: str
    value: float
    kind: int
    low: float
    high: float


def draw(figure: PaperFigure, form: str = "svg") -> bytes:
    """Return the picture of a figure in a format."""
    panels = bars_of(figure)
    heights = [len(bars) + 2.5 for bars in panels.values()]

    def paint(picture: Picture) -> None:
        panes = picture.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (unit, bars) in zip(panes, panels.items(), strict=True):
            rows, colors = range(len(bars)), [color_of(bar.kind) for bar in bars]
            ranges = (  # 0, not negative, where a value is outside its range
                [max(bar.value - bar.low, 0.0) for bar in bars],
                [max(bar.high - bar.value, 0.0) for bar in bars],
            )
            drawn = axes.barh(rows, [bar.value for bar in bars], xerr=ranges, color=colors, ecolor="gray")
            axes.bar_label(drawn, [number(bar.value) for bar in bars], padding=3, fontsize=7)
            axes.set_yticks(rows, [bar.name for bar in bars], fontsize=8)
            axes.set_ylim(len(bars) - 0.4, -0.6)
            axes.set_xlabel(unit or "value")
            axes.grid(False, axis="y")
            values = [bar.value for bar in bars if bar.value > 0]
            if max(values) > LOGARITHMIC * min(values):
                axes.set_xscale("log")
            axes.margins(x=0.12)
        used = sorted({bar.kind for bars in panels.values() for bar in bars})
        marks = [panes[0].barh([0], [0], color=color_of(kind), label=KINDS[kind]) for kind in used]
        picture.legend(handles=marks, loc="outside lower center", ncols=len(used))
        picture.suptitle(f"{figure.paper}, {figure.place}: {figure.title}", x=0.01, ha="left")

    return render(paint, 10, BAR * sum(heights) + 1.2, form)


def bars_of(figure: PaperFigure) -> dict[str, list[ValueBar]]:
    """Return the bars of each unit, in the order of the figure."""
    panels = defaultdict[str, list[ValueBar]](list)
    for row in figure.rows:
        values = row.value, row.prediction.ours, row.prediction.fitted, measured_of(figure, row)
        for kind, value in enumerate(values):
            if value is not None:
                name = row.quantity if kind == 0 else ""
                panels[row.unit].append(ValueBar(name, value, kind, value, value))
    for measured in figure.measurement.rows if figure.measurement else ():
        panels[measured.unit].append(ValueBar(measured.name, measured.value, 3, measured.low, measured.high))
    return panels
