"""Data of the papers: every table and figure with results has a row, and what is predicted and measured is of one."""

from __future__ import annotations

import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from unisono.cli import app
from unisono.errors import UsageError
from unisono.papers.figures import (
    MEASURED,
    PREDICTED,
    MeasuredRow,
    PaperMeasurement,
    PaperPrediction,
    PaperRow,
    all_figures,
    counted,
    data,
    find_figure,
)
from unisono.papers.measure import runs_of
from unisono.training.recipe import find_recipe, read_recipe

ROOT = Path(__file__).parents[2]

PLACES = {
    "DIMD": ("table", (1, 2), (*range(5, 17),)),
    "Theano-MPI": ("table", (1, 2, 3), (3, 4, 5)),
    "PCL-DNN": ("table", (1,), (3, 4, 5, 6, 7)),
    "MXNET-MPI": ("table", (), (13, 14, 15, 16)),
    "swCaffe": ("table", (2, 3), (2, 6, 7, 8, 9, 10, 11)),
}
"""Numbers of the tables and of the figures of each paper that have results."""


def test_every_table_and_figure_has_a_row() -> None:
    there = {(figure.paper, figure.place) for figure in counted()}
    wanted = set()
    for paper, (_, tables, figures) in PLACES.items():
        wanted |= {(paper, f"table {number}") for number in tables} | {
            (paper, f"figure {number}") for number in figures
        }
    assert there == wanted
    assert len(there) == len(counted()) == 39


def test_every_figure_has_a_value_or_a_claim_and_says_how_it_was_read() -> None:
    for name, figure in all_figures().items():
        assert figure.rows, name
        assert figure.read, name
        assert all((row.value is None) != (not row.claim) for row in figure.rows), name
        quantities = [row.quantity for row in figure.rows]
        assert len(set(quantities)) == len(quantities), name


def test_every_figure_has_ours_or_the_reason_why_not() -> None:
    without = [
        name for name, figure in all_figures().items() if not (figure.measure or figure.none or _is_predicted(name))
    ]
    assert without == []


def _is_predicted(name: str) -> bool:
    return any(row.prediction.best is not None for row in find_figure(name).rows)


def test_predictions_and_measurements_are_of_rows_that_are_there() -> None:
    for name, rows in data(PREDICTED).items():
        assert set(rows) <= {row.quantity for row in find_figure(name).rows}, name
    assert set(data(MEASURED)) <= set(all_figures())
    for figure in counted():
        compared = [row.measured for row in figure.rows if row.measured]
        if figure.measurement is not None:
            assert all(figure.measurement.value(names) is not None for names in compared), figure.id


def test_a_measurement_of_the_release_is_by_the_command_of_the_figure_or_a_benchmark() -> None:
    for figure in counted():
        if figure.measurement is not None and figure.measurement.command != figure.measure:
            program = figure.measurement.command.split()[1]
            assert program.startswith("benchmarks/"), figure.id
            assert (ROOT / program).exists(), figure.id


def test_a_prediction_that_is_far_off_has_a_reason() -> None:
    rows = [row for figure in all_figures().values() for row in figure.rows if row.prediction != PaperPrediction()]
    assert [row.quantity for row in rows if not row.close(row.prediction.ours) and not row.prediction.reason] == []


def test_no_value_is_an_input_of_its_own_prediction() -> None:
    for figure in all_figures().values():
        assert [row.quantity for row in figure.rows if row.prediction.spent and row.prediction.fitted is not None] == []


@pytest.mark.parametrize("name", all_figures())
def test_commands_are_those_that_there_are(name: str) -> None:
    figure, commands = find_figure(name), typer.main.get_command(app)
    for text in (figure.predict, *(run.command for run in runs_of(figure))):
        arguments = shlex.split(text.replace("{out}", "OUT"))
        for start in (at for at, word in enumerate(arguments) if word == "unisono"):
            rest = arguments[start + 1 :]
            command = commands.commands[rest[0]]
            if rest[0] == "bench":
                command, rest = command.commands[rest[1]], rest[1:]
            known = {option for parameter in command.params for option in parameter.opts}
            own = rest[1 : rest.index("--")] if "--" in rest else rest[1:]
            assert {word for word in own if word.startswith("--")} <= known, text


@pytest.mark.parametrize("name", all_figures())
def test_changes_of_recipes_are_those_that_there_are(name: str) -> None:
    for run in runs_of(find_figure(name)):
        arguments = shlex.split(run.command)
        if "train" in arguments:
            changes = [value for option, value in pairwise(arguments) if option == "--set"]
            read_recipe(find_recipe(Path(arguments[arguments.index("train") + 1])), changes)


def test_an_unknown_figure_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean dimd-figure-7"):
        find_figure("dimd-fig-7")


def test_a_ratio_a_bound_and_what_is_near() -> None:
    row = PaperRow("speedup", 10.0)
    assert row.ratio(11.0) == pytest.approx(1.1)
    assert row.close(11.5)
    assert not row.close(11.6)
    assert row.ratio(None) is None
    assert not row.close(None)
    assert PaperRow("time", 10.0, at_most=True).close(1.0)
    assert not PaperRow("time", 10.0, at_most=True).close(10.1)
    assert PaperRow("drawn", claim="it falls").ratio(1.0) is None


def test_a_measured_value_is_a_row_or_a_ratio_of_two() -> None:
    measurement = PaperMeasurement(
        "2026-01-01", "a machine", "", tuple(MeasuredRow(n, "s", v, v, v) for n, v in (("a", 6), ("b", 3)))
    )
    assert measurement.value(("a",)) == 6
    assert measurement.value(("a", "b")) == 2
    assert measurement.value(("a", "c")) is None
    assert measurement.value(()) is None
