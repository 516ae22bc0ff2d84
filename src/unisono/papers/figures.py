"""The papers' tables and figures as data: theirs, what is predicted for them, and what has been measured here.

    NAME.toml         of a paper: its figures, the values of each, how they were read, and a command that measures ours
    predicted.json    ours at their size and on their machine, by figure and quantity (made by `benchmarks/seeds`)
    measured.json     ours, small, on a machine that is named: by figure

    figure               theirs                  predicted, nothing fitted    with theirs           measured
    swcaffe-figure-10    speedup 561.58          991                          550                   -
    dimd-figure-7        shuffle 4.2 s           -                            -                     0.5, 0.25 s ...

The second prediction may use other measurements of the paper (a rate, a cost); those are spent: not predicted. Where a
figure of ours is comparable in itself, such as a ratio of two times, its row names what is measured for it.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from unisono.errors import UsageError
from unisono.tables import parse, rows

PAPERS = ("dimd", "theano_mpi", "pcl_dnn", "mxnet_mpi", "swcaffe")
PREDICTED, MEASURED = "predicted.json", "measured.json"

WITHIN = 0.15
"""Largest difference to a value of a paper that needs no reason."""


@dataclass(frozen=True)
class PaperPrediction:
    """Values that equations and plans give for one of a paper."""

    ours: float | None = None
    """With nothing fitted; None where an input is missing."""
    fitted: float | None = None
    """With other measurements of the paper as inputs; None where they give nothing else."""
    spent: bool = False
    """True where the value itself is such an input, or follows from it by arithmetic."""
    assumptions: tuple[str, ...] = ()
    """Inputs of `ours` that are in no paper."""
    used: str = ""
    """Inputs of `fitted`."""
    reason: str = ""
    """Reason why ours is missing, or differs."""
    predicted: bool = True
    """False where two values of the paper are held against each other."""

    @property
    def best(self) -> float | None:
        """PaperPrediction with measurements of the paper, or else with none."""
        return self.ours if self.fitted is None else self.fitted


@dataclass(frozen=True)
class PaperRow:
    """Value of a figure."""

    quantity: str
    value: float | None = None
    """None where the paper draws it, and says in words what it shows."""
    unit: str = ""
    claim: str = ""
    """These words."""
    at_most: bool = False
    """True for a bound."""
    headline: str = ""
    """Short name, where the value is the paper's claim."""
    measured: tuple[str, ...] = ()
    """Measured row that is comparable, or two whose ratio is."""
    prediction: PaperPrediction = PaperPrediction()

    def ratio(self, ours: float | None) -> float | None:
        """Return ours over theirs."""
        return None if ours is None or not self.value else ours / self.value

    def close(self, ours: float | None) -> bool:
        """Return True within 15%, or below a bound."""
        ratio = self.ratio(ours)
        return ratio is not None and (ratio <= 1 if self.at_most else abs(ratio - 1) <= WITHIN)


@dataclass(frozen=True)
class MeasuredRow:
    """Measured value, with the range of its samples."""

    name: str
    unit: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PaperMeasurement:
    """Rows measured for a figure, with the machine and the date."""

    date: str
    machine: str
    command: str = ""
    rows: tuple[MeasuredRow, ...] = ()

    def value(self, names: tuple[str, ...]) -> float | None:
        """Return the value of a row, or the ratio of two; None where one is missing."""
        values = {row.name: row.value for row in self.rows}
        if not names or any(name not in values for name in names):
            return None
        return values[names[0]] / (values[names[1]] if len(names) > 1 else 1)


@dataclass(frozen=True)
class PaperFigure:
    """Table or figure of a paper; a section, where a value is in the text alone."""

    id: str
    section: str
    title: str
    read: str
    """Source of the values in the paper."""
    differs: str = ""
    """Difference of what is measured here from theirs."""
    none: str = ""
    """Reason why there is no counterpart."""
    predict: str = ""
    """Command that predicts it, for who wants other sizes."""
    measure: str = ""
    """Command that measures it, with a place for its output and for each axis."""
    axes: Mapping[str, Any] = field(default_factory=dict)
    """Values of each axis: a list, or a table of texts by label."""
    only: str = ""
    """Unit of the measured rows that belong to the figure; empty: all."""
    rows: tuple[PaperRow, ...] = rows("row")
    paper: str = ""
    measurement: PaperMeasurement | None = None

    @property
    def place(self) -> str:
        """Place in the paper, in words."""
        kind, number = self.id.split("-")[-2:]
        return f"text of {number}" if kind == "section" else f"{kind} {number}"

    @property
    def state(self) -> str:
        """Kinds of ours that are beside theirs, in words."""
        if self.none:
            return "no counterpart"
        predicted = any(row.prediction.best is not None for row in self.rows)
        kinds = [word for word, present in (("predicted", predicted), ("measured", self.measurement)) if present]
        return ", ".join(kinds) or "theirs only"


@dataclass(frozen=True)
class _Paper:
    name: str
    figures: tuple[PaperFigure, ...] = rows("figure")


def data(name: str) -> Any:
    """Return the content of a file of the package."""
    content = files("unisono.papers").joinpath(name).read_text(encoding="utf-8")
    return json.loads(content) if name.endswith(".json") else tomllib.loads(content)


@cache
def all_figures() -> Mapping[str, PaperFigure]:
    """Return the figures of the five papers by name, as in `unisono papers dimd-figure-7`."""
    return {figure.id: figure for name in PAPERS for figure in _figures_of(name)}


def _figures_of(name: str) -> Iterator[PaperFigure]:
    predicted, measured = data(PREDICTED), data(MEASURED)
    paper = parse(_Paper, data(f"{name}.toml"), f"{name}.toml")
    for figure in paper.figures:
        key = f"{name.replace('_', '-')}-{figure.id}"
        known = predicted.get(key, {})
        given = tuple(
            replace(row, prediction=parse(PaperPrediction, known.get(row.quantity, {}), PREDICTED))
            for row in figure.rows
        )
        measurement = parse(PaperMeasurement, measured[key], MEASURED) if key in measured else None
        yield replace(figure, id=key, rows=given, paper=paper.name, measurement=measurement)


def counted() -> list[PaperFigure]:
    """Return the tables and figures, without what is in the text alone."""
    return [figure for figure in all_figures().values() if "-section-" not in figure.id]


def find_figure(name: str) -> PaperFigure:
    """Return a figure by its name. Raises UsageError naming the nearest ones."""
    if name in all_figures():
        return all_figures()[name]
    near = difflib.get_close_matches(name, all_figures(), n=3)
    remedy = f"did you mean {', '.join(near)}?" if near else "unisono papers lists them"
    raise UsageError(f"there is no figure {name!r}; {remedy}")
