"""Measurements of figures: their runs, what is not repeated, and the rows of each file that commands write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.papers.figures import PaperFigure, all_figures, find_figure
from unisono.papers.measure import carry_out, collect, is_done, read_rows, result_file, runs_of, with_own

COUNTED = PaperFigure("x-figure-1", "1", "a title", "text", measure="unisono bench memory --output {out}")


METRICS = [
    {"seconds": 9.0, "computing": 8.0, "communicating": 1.0, "waiting": 0.5, "test_accuracy": 0.5, "test_loss": 1.0}
    | {"loss": 2.0, "elapsed": 9.0},
    {"seconds": 2.0, "computing": 9.0, "communicating": 1.5, "waiting": 0.75, "test_accuracy": 0.75}
    | {"test_top5": 0.9375, "test_loss": 0.5, "loss": 0.25, "elapsed": 11.0},
]
"""Of two epochs of training."""


def test_runs_are_the_grid_of_the_axes() -> None:
    axes = {"hosts": [2, 4], "way": {"AR": "--a 1", "ASA": "--b"}}
    runs = runs_of(replace(COUNTED, measure="lab {hosts} {way} --output {out}", axes=axes))
    assert [run.label for run in runs] == ["hosts 2, AR", "hosts 2, ASA", "hosts 4, AR", "hosts 4, ASA"]
    assert runs[3].command == "lab 4 --b --output {out}"
    assert runs_of(replace(COUNTED, measure="")) == []


def test_figures_with_the_same_command_share_a_run(tmp_path: Path) -> None:
    first, second = (runs_of(find_figure(name))[0] for name in ("dimd-figure-13", "dimd-figure-15"))
    assert first.folder(tmp_path) == second.folder(tmp_path)


@pytest.mark.launches
def test_a_figure_is_measured_once(tmp_path: Path) -> None:
    (run,) = runs_of(COUNTED)
    assert with_own(COUNTED, tmp_path) == COUNTED
    (run.folder(tmp_path)).mkdir(parents=True)
    (run.folder(tmp_path) / "half").touch()  # an interrupted run
    assert not is_done(run, tmp_path)
    carry_out(run, tmp_path)
    assert is_done(run, tmp_path)
    assert not (run.folder(tmp_path) / "half").exists()
    collect(COUNTED, tmp_path)
    measurement = with_own(COUNTED, tmp_path).measurement
    assert measurement is not None
    assert measurement.command == COUNTED.measure
    assert next(row.name for row in measurement.rows) == "reads of 4 KiB"
    assert all(row.unit == "GB/s" and 0 < row.low <= row.value <= row.high for row in measurement.rows)


@pytest.mark.launches
def test_a_command_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    (run,) = runs_of(replace(COUNTED, measure="unisono bench networks --names nothing --output {out}"))
    with pytest.raises(UsageError, match=r"unisono bench networks --names nothing.*nothing"):
        carry_out(run, tmp_path)
    assert not is_done(run, tmp_path)


def test_damaged_rows_are_named(tmp_path: Path) -> None:
    (run,) = runs_of(COUNTED)
    run.folder(tmp_path).mkdir(parents=True)
    (run.folder(tmp_path) / "rows.json").write_text("[")
    with pytest.raises(UsageError, match=r"cannot read .*rows.json: .*; remove .*, and measure again"):
        carry_out(run, tmp_path)


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    result_file(COUNTED, tmp_path).write_text("{")
    with pytest.raises(UsageError, match=r"cannot read .*x-figure-1.json"):
        with_own(COUNTED, tmp_path)


def test_rows_of_each_file(tmp_path: Path) -> None:
    files = {
        "metrics.jsonl": "\n".join(map(json.dumps, METRICS)),
        "networks.json": {
            "networks": [
                {"network": "a", "batch": 8, "seconds": {"ours": [1, 2, 4], "stock": [4, 4, 4]}}
                | {"scoring": {"ours": [1], "stock": [2]}}
            ]
        },
        "layers.json": {
            "peak": {"operations_per_second": 1e9},
            "rows": [
                {"layer": "c", "pass_name": "forward", "seconds": 0.01, "operations": 5e6}
                | {"times": {"library": 0.02, "product": 0.01}},
                {"layer": "p", "pass_name": "forward", "seconds": 0.02, "operations": 0, "times": {}},
            ],
        },
        "results.json": {
            "sizes": [
                {"bytes": 4, "contenders": {"ring": {"low_us": 1, "median_us": 1, "high_us": 1}}},
                {"bytes": 1 << 20, "contenders": {"ring": {"low_us": 1e3, "median_us": 2e3, "high_us": 4e3}}},
            ]
        },
        "shuffle.json": [{"name": "a shuffle", "unit": "s", "samples": [3, 1, 2]}],
        "other.json": {},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    rows = {row.name: (row.unit, row.value, row.low, row.high) for row in read_rows(tmp_path)}
    assert rows == {
        "an epoch": ("s", 2, 2, 2),
        "computing in an epoch": ("s", 1, 1, 1),
        "exchange in an epoch": ("s", 0.5, 0.5, 0.5),
        "waiting in an epoch": ("s", 0.25, 0.25, 0.25),
        "test accuracy": ("%", 75, 75, 75),
        "top-5 accuracy": ("%", 93.75, 93.75, 93.75),
        "top-5 error": ("%", 6.25, 6.25, 6.25),
        "test loss": ("", 0.5, 0.5, 0.5),
        "training loss": ("", 0.25, 0.25, 0.25),
        "the whole run": ("s", 11, 11, 11),
        "a, training, ours": ("images/s", 4, 2, 8),
        "a, training, stock": ("images/s", 2, 2, 2),
        "a, scoring, ours": ("images/s", 8, 8, 8),
        "a, scoring, stock": ("images/s", 4, 4, 4),
        "c, forward": ("ms", 10, 10, 10),
        "c, forward: share of peak": ("%", 50, 50, 50),
        "c, forward by library": ("ms", 20, 20, 20),
        "c, forward by library: share of peak": ("%", 25, 25, 25),
        "c, forward by product": ("ms", 10, 10, 10),
        "c, forward by product: share of peak": ("%", 50, 50, 50),
        "p, forward": ("ms", 20, 20, 20),
        "ring, 1 MiB": ("ms", 2, 1, 4),
        "a shuffle": ("s", 2, 1, 3),
    }


def test_figures_of_training_compare_rows_that_training_writes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, METRICS)))
    written = {row.name for row in read_rows(tmp_path)}
    for figure in all_figures().values():
        if " unisono train " in f" {figure.measure}":
            compared = {name.rpartition(": ")[2] for row in figure.rows for name in row.measured}
            assert compared <= written, figure.id


def test_messages_of_a_probe(tmp_path: Path) -> None:
    (tmp_path / "probe.toml").write_text('name = "n"\n[node]\ncores = 1\n[link]\nbandwidth = 1e9\nlatency = 1e-6\n')
    rows = {row.name: (row.unit, row.value) for row in read_rows(tmp_path)}
    assert rows == {"latency of 4 bytes": ("ms", 0.001), "bandwidth of long messages": ("MB/s", 1000)}
