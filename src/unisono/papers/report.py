"""The papers' figures as text: a list of them, or one with theirs, ours predicted, ours measured and the commands.

$ unisono papers dimd-figure-6
quantity                          theirs  predicted        with theirs       measured
efficiency, 32 nodes              90.5 %  92.3   1.02      -                 -

A picture of one has a panel for each unit. Bars of a row are theirs, and ours predicted and measured where they are
comparable; below are all measured rows of the unit, with their ranges.

    images/s   theirs      ▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬         s   2 learners   ▬▬▬▬▬▬▬▬▬▬▬▬▬├─┤
               predicted   ▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬▬          4 learners   ▬▬▬▬▬▬▬├┤
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.formats import column_table, text_table
from unisono.papers.figures import WITHIN, PaperFigure, PaperPrediction, PaperRow, all_figures
from unisono.papers.measure import runs_of
from unisono.view.chart import color_of, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

WIDE = 118
"""Columns of text."""


def number(value: float | None) -> str:
    """Return a value with three digits or more; a dash for None.

    >>> number(0.0512), number(1234.5), number(94.17), number(None)
    ('0.0512', '1,234', '94.2', '-')
    """
    return "-" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def theirs_in_words(row: PaperRow) -> str:
    """Return a value of a paper as it stands there."""
    return "" if row.value is None else f"{row.value:,.10g} {row.unit}".rstrip()


def beside(row: PaperRow, ours: float | None) -> str:
    """Return ours, and its ratio to theirs in brackets."""
    if (ratio := row.ratio(ours)) is None:
        return "-"
    return f"{number(ours)} ({'below' if row.at_most and ratio <= 1 else f'{ratio:.2f}'})"


def measured_of(figure: PaperFigure, row: PaperRow) -> float | None:
    """Return what was measured for a row, where it is comparable."""
    return None if figure.measurement is None else figure.measurement.value(row.measured)


def closest(figure: PaperFigure) -> str:
    """Return ours over theirs of the figure's first row that has it, and of which kind ours is."""
    for row in figure.rows:
        for ours, word in ((measured_of(figure, row), "measured"), (row.prediction.best, "predicted")):
            if (ratio := row.ratio(ours)) is not None:
                return f"{ratio:.2f} {word}"
    return ""


def listing(figures: Sequence[PaperFigure]) -> Iterator[str]:
    """Yield the lines of the list of figures, and sums of them."""
    yield from column_table(
        (
            ("figure", lambda figure: figure.id),
            ("what it shows", lambda figure: textwrap.shorten(figure.title, 66, placeholder=" ...")),
            ("ours", lambda figure: figure.state),
            ("ours / theirs", closest),
        ),
        figures,
        left=(0, 1, 2),
    )
    shown, rows = sum(figure.state not in ("no counterpart", "theirs only") for figure in figures), predicted_rows()
    near = ", ".join(f"{near} {word}" for word, near in near_of(rows).items())
    yield ""
    yield f"{shown} of {len(figures)} have ours beside theirs"
    yield f"of {len(rows)} predictions, {near} are within {WITHIN:.0%}"
    yield "unisono papers FIGURE prints one; --measure measures it here, --picture FILE draws it"


def predicted_rows() -> list[PaperRow]:
    """Return the rows of all figures and sections that are predictions, or should be."""
    rows = [row for figure in all_figures().values() for row in figure.rows]
    return [row for row in rows if row.prediction.predicted and row.prediction != PaperPrediction()]


def near_of(rows: Sequence[PaperRow]) -> dict[str, int]:
    """Return the number of predictions within 15% of both kinds; none has its own value as an input."""
    return {
        "with nothing fitted": sum(row.close(row.prediction.ours) for row in rows),
        "with measurements of theirs": sum(row.close(row.prediction.best) for row in rows),
    }


def report(figure: PaperFigure) -> Iterator[str]:
    """Yield the lines about a figure."""
    yield f"{figure.paper}, {figure.place} (section {figure.section}): {figure.title}"
    yield ""
    heads = ["", "theirs", "predicted", "with theirs", "measured here"]
    cells = [
        [
            row.quantity,
            theirs_in_words(row),
            beside(row, row.prediction.ours),
            "an input" if row.prediction.spent else beside(row, row.prediction.fitted),
            beside(row, measured_of(figure, row)),
        ]
        for row in figure.rows
        if not row.claim
    ]
    used = [column for column in range(5) if column < 2 or any(row[column] != "-" for row in cells)]
    if cells:
        yield from text_table([[row[column] for column in used] for row in [heads, *cells]], left=(0,))
    for row in figure.rows:
        if row.claim:
            yield f"{row.quantity}: {row.claim}"
    yield ""
    yield from _sentences("theirs", [figure.read])
    yield from _sentences("ours", [figure.none])
    for label, texts in notes_of(figure):
        yield from _sentences(label, texts)
    yield from _measured(figure)
    if figure.predict:
        yield f"predict again    {figure.predict}"
    if figure.measure:
        count = len(runs_of(figure))
        yield f"measure again    unisono papers {figure.id} --measure"
        yield f"which runs       {figure.measure}" + (f"    ({count} times)" if count > 1 else "")


def notes_of(figure: PaperFigure) -> list[tuple[str, list[str]]]:
    """Return what was assumed, used and left unexplained in the predictions of a figure, each once."""
    predictions = [row.prediction for row in figure.rows]
    notes = {
        "assumed": [note for prediction in predictions for note in prediction.assumptions],
        "with theirs": [prediction.used for prediction in predictions],
        "why": [prediction.reason for prediction in predictions],
    }
    return [(label, list(dict.fromkeys(filter(None, texts)))) for label, texts in notes.items()]


def _measured(figure: PaperFigure) -> Iterator[str]:
    """Yield what was measured here: where, when, and all rows with their range."""
    measurement = figure.measurement
    yield from _sentences("ours", [figure.differs])
    if measurement is None:
        return
    yield ""
    by = "" if measurement.command == figure.measure else f", by {measurement.command}"
    yield f"measured on {measurement.machine}, {measurement.date}{by}: median, and range"
    rows = [[row.name, f"{number(row.value)} {row.unit}", _range(row.low, row.high)] for row in measurement.rows]
    yield from (f"  {line}" for line in text_table(rows, left=(0,)))
    yield ""


def _range(low: float, high: float) -> str:
    return "" if low == high else f"{number(low)} to {number(high)}"


def _sentences(head: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield sentences behind a word in a column of its own."""
    for text in filter(None, texts):
        yield from textwrap.wrap(text, WIDE, initial_indent=f"{head:17}", subsequent_indent=" " * 17)
        head = ""


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
