from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from rich.console import Console
from tests.training.sweep.test_results import results

from unisono.training.measures import PERPLEXITY
from unisono.training.sweep.directory import RunOutcome, RunStatus, Sweep
from unisono.training.sweep.plan import parse_grid
from unisono.training.sweep.report import run_table, seed_table, tables, to_json, to_markdown, to_rich
from unisono.training.sweep.results import RunResult

Plan = Callable[..., Sweep]


def test_a_row_for_each_run_and_the_best_one() -> None:
    grid = parse_grid(["rule.every=1,4", "training.epochs=3", "optimizer.learning_rate=0.05,0.1"])
    table = run_table(grid, results(grid, [0.5, 0.75, None, 0.25]))
    assert table.header == ("every", "learning_rate", "test accuracy", "highest (epoch)", "time", "samples/s", "result")
    assert table.rows == (
        ("1", "0.05", "50.00%", "50.00% (3)", "10.0 s", "100", "ended"),
        ("1", "0.1", "75.00%", "75.00% (3)", "10.0 s", "100", "best"),
        ("4", "0.05", "–", "–", "–", "–", "failed, exit code 1"),
        ("4", "0.1", "25.00%", "25.00% (3)", "10.0 s", "100", "ended"),
    )
    assert table.best == 1


def test_without_an_ended_run_none_is_the_best() -> None:
    grid = parse_grid(["rule.every=1,4"])
    table = run_table(grid, [RunResult(point, RunOutcome(), None) for point in grid.points()])
    assert table.best is None
    assert [row[-1] for row in table.rows] == ["waiting", "waiting"]
    assert tables(grid, []) == [run_table(grid, [])]


def test_mean_and_spread_over_seeds() -> None:
    grid = parse_grid(["rule.every=1,4,16", "training.seed=0,1"])
    table = seed_table(grid, results(grid, [0.5, 0.6, 0.7, None, None, None]))
    assert table is not None
    assert table.header == ("every", "mean test accuracy", "standard deviation", "range", "seeds")
    assert table.rows == (
        ("1", "55.00%", "7.07%", "50.00% to 60.00%", "2 of 2"),
        ("4", "70.00%", "–", "70.00% to 70.00%", "1 of 2"),
        ("16", "–", "–", "–", "0 of 2"),
    )
    assert table.best == 1
    assert seed_table(parse_grid(["rule.every=1,4"]), []) is None


def test_the_table_on_the_screen_has_every_cell() -> None:
    grid = parse_grid(["rule.every=1,4", "model.name=alexnet,resnet50"])
    table = run_table(grid, results(grid, [0.5, 0.75, None, 0.25]))
    console = Console(width=200)
    with console.capture() as shown:
        console.print(to_rich(table))
    assert all(cell in shown.get() for row in (table.header, *table.rows) for cell in row)


def test_a_narrow_screen_folds_cells_and_cuts_none() -> None:
    grid = parse_grid(["optimizer.learning_rate=0.1234,4"])
    console = Console(width=40)
    with console.capture() as shown:
        console.print(to_rich(run_table(grid, results(grid, [0.5, None]))))
    assert "…" not in shown.get()


def test_the_page(planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = planned("rule.every=1,4", "training.epochs=3")
    found = results(sweep.grid, [0.5, None])
    found[1] = RunResult(found[1].point, RunOutcome(RunStatus.FAILED, 1, "ValueError: no such class"), None)
    assert to_markdown(sweep, found, ["heat_map.svg"]) == (
        """# Sweep of digits

- `rule.every`: 1, 4
- `training.epochs`: 3

## Runs

| every | test accuracy | highest (epoch) | time | samples/s | result |
| ---: | ---: | ---: | ---: | ---: | --- |
| **1** | **50.00%** | **50.00% (3)** | **10.0 s** | **100** | **best** |
| 4 | – | – | – | – | failed, exit code 1 |

## Failures

- every=4: `ValueError: no such class` (`2-every=4/output.txt`)

![heat map](heat_map.svg)
"""
    )


def test_json_has_typed_values_and_shares(planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=1e-1,1", "training.seed=0,1")
    content = json.loads(to_json(sweep, results(sweep.grid, [0.5, 0.75, None, 0.25])))
    assert content["grid"] == {"optimizer.learning_rate": ["1e-1", "1"], "training.seed": ["0", "1"]}
    assert content["best"] == "2-learning_rate=1e-1-seed=1"
    assert content["runs"][1] == {
        "name": "2-learning_rate=1e-1-seed=1",
        "values": {"optimizer.learning_rate": 0.1, "training.seed": 1},
        "status": "ended",
        "exit_code": 0,
        "error": "",
        "epochs": 3,
        "test_accuracy": 0.75,
        "best_test_accuracy": 0.75,
        "best_epoch": 3,
        "seconds": 10.0,
        "samples_per_second": 100.0,
    }
    assert content["seeds"][0]["values"] == {"optimizer.learning_rate": "1e-1"}
    assert content["seeds"][0]["mean"] == 0.625
    assert content["seeds"][1]["test_accuracies"] == [0.25]
    assert content["seeds"][1]["std"] is None


def test_texts_have_columns_of_perplexity(planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=0.1,0.2", "training.seed=0,1")
    ended = [
        replace(result, summary=result.summary and replace(result.summary, measure=PERPLEXITY))
        for result in results(sweep.grid, [5.0, 4.5, 4.0, inf])
    ]
    table, seeds = tables(sweep.grid, ended)
    assert table.header[2:4] == ("test perplexity", "lowest (epoch)")
    assert [row[2:4] for row in table.rows] == [
        *(("5.00", "5.00 (3)"), ("4.50", "4.50 (3)"), ("4.00", "4.00 (3)"), ("inf", "inf (3)"))
    ]
    assert table.best == 2
    assert seeds.header[1] == "mean test perplexity"
    assert seeds.rows[0][1:4] == ("4.75", "0.35", "4.50 to 5.00")
    assert seeds.best == 0
    content = json.loads(to_json(sweep, ended), parse_constant=pytest.fail)
    assert (content["runs"][2]["test_perplexity"], content["runs"][2]["best_test_perplexity"]) == (4.0, 4.0)
    assert "test_accuracy" not in content["runs"][2]
    assert content["runs"][3]["test_perplexity"] is None
    assert content["seeds"][1]["test_perplexities"] == [4.0, None]
