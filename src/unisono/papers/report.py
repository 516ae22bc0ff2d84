"""The papers' figures as text: a list of them, or one with theirs, ours predicted, ours measured and the commands.

$ unisono papers dimd-figure-6
quantity                          theirs  predicted        with theirs       measured
efficiency, 32 nodes              90.5 %  92.3   1.02      -                 -
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from unisono.formats import column_table, text_table
from unisono.papers.figures import WITHIN, PaperFigure, PaperPrediction, PaperRow, all_figures
from unisono.papers.measure import runs_of

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
