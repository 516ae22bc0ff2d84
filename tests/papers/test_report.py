"""The papers' figures as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.papers.figures import (
    MeasuredRow,
    PaperFigure,
    PaperMeasurement,
    PaperPrediction,
    PaperRow,
    all_figures,
    counted,
    find_figure,
)
from unisono.papers.report import (
    bars_of,
    beside,
    closest,
    draw,
    listing,
    near_of,
    number,
    predicted_rows,
    report,
)

ROWS = (
    PaperRow(
        "speedup",
        10.0,
        "x",
        prediction=PaperPrediction(12.0, 11.0, assumptions=("a link",), used="a rate", reason="why not"),
    ),
    PaperRow("input", 5.0, "x", prediction=PaperPrediction(6.0, spent=True)),
    PaperRow("ratio", 2.0, "x", measured=("a", "b")),
    PaperRow("drawn", claim="it falls"),
)
MEASURED = PaperMeasurement(
    "2026-01-01",
    "a machine",
    "unisono bench memory --output {out}",
    tuple(MeasuredRow(n, "s", v, 1, v) for n, v in (("a", 6), ("b", 2))),
)
FIGURE = PaperFigure(
    "x-figure-1", "5.1", "a title", "the text", "smaller", "", "unisono plan", "unisono bench memory --output {out}",
    rows=ROWS, paper="X", measurement=MEASURED,
)  # fmt: skip


def test_a_figure_in_words() -> None:
    text = "\n".join(report(FIGURE))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "X, figure 1 (section 5.1): a title"
    assert "theirs predicted with theirs measured here" in lines
    assert "speedup 10 x 12 (1.20) 11 (1.10) -" in lines
    assert "input 5 x 6 (1.20) an input -" in lines
    assert "ratio 2 x - - 3 (1.50)" in lines
    assert "drawn: it falls" in lines
    assert "theirs the text" in lines
    assert "assumed a link" in lines
    assert "with theirs a rate" in lines
    assert "why why not" in lines
    assert "a 6 s 1 to 6" in lines
    assert "measured on a machine, 2026-01-01: median, and range" in lines
    assert "measure again unisono papers x-figure-1 --measure" in lines
    assert "which runs unisono bench memory --output {out}" in lines


def test_columns_without_a_value_are_left_out() -> None:
    text = "\n".join(report(PaperFigure("x-figure-2", "1", "t", "r", none="no devices", rows=(PaperRow("a", 1.0),))))
    assert "predicted" not in text
    assert "ours             no devices" in text


@pytest.mark.parametrize("name", all_figures())
def test_every_figure_is_printed_and_has_its_bars(name: str) -> None:
    figure = find_figure(name)
    assert all(len(line) < 260 for line in report(figure))
    assert (not bars_of(figure)) == (figure.measurement is None and all(row.value is None for row in figure.rows))


@pytest.mark.parametrize("name", ["dimd-figure-12", "pcl-dnn-figure-4", "swcaffe-figure-10", "theano-mpi-table-1"])
def test_figures_are_drawn(name: str) -> None:
    """One with 2 bars and one with 262, in 1 panel and in 5, of one kind of values and of all 4."""
    assert draw(find_figure(name)).startswith(b"<svg")


def test_the_list_has_every_figure_its_state_and_the_sums() -> None:
    lines = list(listing(counted()))
    assert len(lines) == 1 + 39 + 4
    assert "figure" in lines[0]
    near = near_of(predicted_rows())
    assert f"of {len(predicted_rows())} predictions, {near['with nothing fitted']} with nothing fitted" in lines[-2]
    assert near["with nothing fitted"] <= near["with measurements of theirs"] <= len(predicted_rows())


def test_the_states_of_figures() -> None:
    assert FIGURE.state == "predicted, measured"
    assert closest(FIGURE) == "1.10 predicted"
    assert find_figure("dimd-figure-12").state == "no counterpart"


def test_numbers() -> None:
    assert [number(value) for value in (0.0512, 1234.5, 94.17, None)] == ["0.0512", "1,234", "94.2", "-"]
    assert beside(PaperRow("bound", 10.0, at_most=True), 3.0) == "3 (below)"


def test_a_picture_has_theirs_and_ours_by_unit(tmp_path: Path) -> None:
    bars = bars_of(FIGURE)
    assert list(bars) == ["x", "s"]
    assert [(bar.name, bar.value, bar.kind) for bar in bars["x"]] == [
        ("speedup", 10.0, 0),
        ("", 12.0, 1),
        ("", 11.0, 2),
        ("input", 5.0, 0),
        ("", 6.0, 1),
        ("ratio", 2.0, 0),
        ("", 3.0, 3),
    ]
    drawn = draw(FIGURE).decode()
    for text in ("speedup", "theirs", "measured here", "12"):
        assert text in drawn
