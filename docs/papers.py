"""Writes docs/papers.md and its chart from the data of `unisono papers`.

python docs/papers.py                            the page and the chart
python docs/papers.py --measured papers          first takes what `unisono papers --measure` has put into a folder
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import unisono.papers
from unisono.formats import markdown_table
from unisono.papers.figures import MEASURED, WITHIN, PaperFigure, PaperRow, all_figures, counted, data
from unisono.papers.report import beside, measured_of, near_of, notes_of, predicted_rows, theirs_in_words
from unisono.view.chart import color_of, render
from unisono.view.svg import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

DOCS = Path(__file__).parent
PAGE, CHART = DOCS / "papers.md", DOCS / "pictures" / "papers.svg"

LESS_IS_BETTER = ("s", "min", "ms")
"""Units of times: of these the chart has theirs over ours."""

MOST_ROWS = 12
"""Most rows of a figure on the page; the command prints all."""

HEAD = """# The five papers

Unisono is built from five papers ([references](references.md)). They have {count} tables and figures with
results. Each has its rows below: the paper's value, ours predicted at their size and on their machine, and ours
measured, small, on a machine that is named.

```sh
unisono papers                                                   # all, with their state
unisono papers swcaffe-figure-10                                 # one: values, assumptions, reasons, commands
unisono papers swcaffe-figure-10 --picture swcaffe-figure-10.svg
unisono papers dimd-figure-13 --measure                          # ours on your machine, into papers/
```
<!-- prints: swcaffe-figure-10, swCaffe, figure 10, measured on -->

`unisono papers --measure` measures all that can be measured, in 72 minutes on 2 cores of a Xeon;
what has been measured is not repeated. Hosts are those of an [emulated cluster](lab.md), which needs root; without it
these figures are left out, with a line for each.

![Ours over the claim of each paper](pictures/papers.svg)
"""

READ = """## How to read the tables

- **Predicted** has nothing fitted. Inputs that are in no paper, such as the latency of a network or the rate of
  a bus, are the vendor's or published ones: assumptions with a name.
- **With theirs** takes other measurements of the same paper as inputs, such as a rate in use. "An input" is
  such a measurement. No value is an input of its own prediction.
- **Measured** is there where ours is comparable in itself, such as a ratio of two times. All measured values,
  with their ranges, are printed by `unisono papers FIGURE`.
- Measured values of this release are of 2 cores that other programs shared: ranges show it.
- In brackets is ours over theirs. A bound ("at most") counts as near where ours is below it.

Of {rows} predictions, **{plain} are within {within:.0%} with nothing fitted, and {fitted} with measurements of
theirs**. {spent} of the {rows} are such measurements themselves, and count by their own prediction in both; of the
{free} others it is {plain_free} and {fitted_free}. Not counted are the shares that figure 10 of swCaffe follows
from, and values that need no machine: parameters, depths, rounds. Where ours is farther off, the notes have a
reason, with its size where it can be estimated.
"""

FAR = """## What stays farther off

These are not within 15% in their better informed column: its ratio is what the reason in the notes has to explain.
"""


def page() -> str:
    """Return the page."""
    figures, rows = counted(), predicted_rows()
    free = [row for row in rows if not row.prediction.spent]
    (plain, fitted), (plain_free, fitted_free) = (near_of(some).values() for some in (rows, free))
    near = {"plain": plain, "fitted": fitted, "plain_free": plain_free, "fitted_free": fitted_free, "free": len(free)}
    text = READ.format(rows=len(rows), within=WITHIN, spent=len(rows) - len(free), **near)
    parts = [HEAD.format(count=len(figures)), text]
    for paper in dict.fromkeys(figure.paper for figure in figures):
        parts.append("\n".join(_of_paper([figure for figure in all_figures().values() if figure.paper == paper])))
    far = markdown_table(["place", "quantity", "theirs", "predicted", "with theirs"], list(_far_rows()), (0, 1))
    return "\n".join([*parts, "", FAR, *far, ""])


def _of_paper(figures: list[PaperFigure]) -> Iterator[str]:
    """Yield the lines of a paper: a table, and the notes of its figures."""
    yield f"## {figures[0].paper}\n"
    rows = [row for figure in figures for row in _rows(figure)]
    yield from markdown_table(["figure", "quantity", "theirs", "predicted", "with theirs", "measured"], rows, (0, 1))
    yield "\nNotes:\n"
    for figure in figures:
        if notes := list(_notes(figure)):
            yield f"- **{figure.place}**: {'. '.join(notes)}."


def _rows(figure: PaperFigure) -> Iterator[list[str]]:
    """Yield the cells of a figure's rows, the first with its name and title."""
    name = f"**{figure.place}**"
    yield [name, figure.title, "", "", "", "no counterpart" if figure.none else ""]
    for row in figure.rows[:MOST_ROWS]:
        fitted = "an input" if row.prediction.spent else beside(row, row.prediction.fitted)
        quantity = row.quantity if row.value is not None else f"{row.quantity}: {row.claim}"
        cells = [beside(row, row.prediction.ours), fitted, beside(row, measured_of(figure, row))]
        yield ["", quantity, theirs_in_words(row), *("" if cell == "-" else cell for cell in cells)]
    if (more := len(figure.rows) - MOST_ROWS) > 0:
        yield ["", f"{more} more: `unisono papers {figure.id}`", "", "", "", ""]


def _notes(figure: PaperFigure) -> Iterator[str]:
    """Yield what is to be said about a figure, in sentences without their ends."""
    yield f"theirs: {figure.read}"
    if figure.none:
        yield figure.none
    for label, texts in notes_of(figure):
        if texts:
            yield f"*{label}*: {'; '.join(texts)}"
    if figure.differs:
        yield f"*ours*: {figure.differs}"
    if figure.measurement is not None:
        by = "" if figure.measurement.command == figure.measure else f" by `{figure.measurement.command}`"
        yield f"measured on {figure.measurement.machine}, {figure.measurement.date}{by}"


def _far_rows() -> Iterator[list[str]]:
    """Yield the cells of each prediction that is farther off in both columns."""
    for figure in all_figures().values():
        for row in figure.rows:
            if row in predicted_rows() and not row.close(row.prediction.best):
                name = f"{figure.paper}, {figure.place}"
                cells = [beside(row, row.prediction.ours), beside(row, row.prediction.fitted)]
                yield [name, row.quantity, theirs_in_words(row), *("" if cell == "-" else cell for cell in cells)]


def headlines() -> list[tuple[str, PaperFigure, PaperRow]]:
    """Return the claims of the papers: their words, with the figure and its row."""
    return [
        (f"{figure.paper}: {row.headline}, {theirs_in_words(row)}", figure, row)
        for figure in counted()
        for row in figure.rows
        if row.headline
    ]


def factor(row: PaperRow, ours: float | None) -> float | None:
    """Return how many times theirs ours is: above 1 it is the faster."""
    ratio = row.ratio(ours)
    return 1 / ratio if ratio and row.unit in LESS_IS_BETTER else ratio


def chart() -> bytes:
    """Return the chart of the papers' claims: bars of what ours is of them, predicted and measured."""
    kinds = ("predicted, nothing fitted", "predicted, with theirs", "measured here, small")
    claims = headlines()

    def paint(picture: Picture) -> None:
        axes = picture.subplots()
        for place, (_, figure, row) in enumerate(claims):
            for kind, ours in enumerate((row.prediction.ours, row.prediction.fitted, measured_of(figure, row))):
                if (times := factor(row, ours)) is not None:
                    center = place + 0.26 * (kind - 1)
                    axes.barh(center, times, height=0.24, color=color_of(kind))
                    axes.annotate(f" {times:.2f}", (times, center), va="center", fontsize=8)
        axes.axvline(1, color=INK, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(claims)), [label for label, *_ in claims], fontsize=9)
        axes.set_ylim(len(claims) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.set_xlabel("ours over the paper's value; of a time, the paper's over ours")
        marks = [axes.barh([0], [0], color=color_of(kind), label=name) for kind, name in enumerate(kinds)]
        picture.legend(handles=marks, loc="outside lower center", ncols=len(kinds))
        picture.suptitle("Ours over the claim of each paper", x=0.01, ha="left")

    return render(paint, 11, 4.6)


def take(folder: Path) -> None:
    """Put what has been measured into a folder into the package."""
    path = Path(unisono.papers.__file__).with_name(MEASURED)
    known = data(MEASURED)
    known |= {
        name: json.loads(file.read_text()) for name in all_figures() if (file := folder / f"{name}.json").exists()
    }
    path.write_text(json.dumps({name: known[name] for name in all_figures() if name in known}, indent=1) + "\n")
    all_figures.cache_clear()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measured"]:
        take(Path(sys.argv[2]))
    PAGE.write_text(page(), encoding="utf-8")
    CHART.write_bytes(chart())
