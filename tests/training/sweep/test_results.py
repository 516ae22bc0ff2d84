from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from rich.console import Console

from unisono.training.measures import PERPLEXITY, Curve
from unisono.training.run_directory import METRICS, add_metrics
from unisono.training.sweep.grid import Grid, RunOutcome, RunStatus, Sweep, parse_grid
from unisono.training.sweep.results import (
    RunGroup,
    RunResult,
    best_of,
    grouped,
    heat_maps,
    keys_beside_seed,
    results_of,
    run_table,
    shared_measure,
    tables,
    to_json,
    to_markdown,
)
from unisono.training.sweep.run import to_rich
from unisono.view.heat_map import HeatCell, HeatMap

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
    table = run_table(grid, [RunResult(point, RunOutcome()) for point in grid.points()])
    assert table.best is None
    assert [row[-1] for row in table.rows] == ["waiting", "waiting"]
    assert tables(grid, []) == [run_table(grid, [])]


def test_mean_and_spread_over_seeds() -> None:
    grid = parse_grid(["rule.every=1,4,16", "training.seed=0,1"])
    _, table = tables(grid, results(grid, [0.5, 0.6, 0.7, None, None, None]))
    assert table.header == ("every", "mean test accuracy", "standard deviation", "range", "seeds")
    assert table.rows == (
        ("1", "55.00%", "7.07%", "50.00% to 60.00%", "2 of 2"),
        ("4", "70.00%", "–", "70.00% to 70.00%", "1 of 2"),
        ("16", "–", "–", "–", "0 of 2"),
    )
    assert table.best == 1


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
    runs = results(sweep.grid, [0.5, None])
    runs[1] = RunResult(runs[1].point, RunOutcome(RunStatus.FAILED, 1, "ValueError: no such class"))
    assert to_markdown(sweep, runs, ["heat_map.svg"]) == (
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


def test_a_table_is_a_value_of_a_sweep(planned: Plan) -> None:
    sweep = planned("parallel.layers={},auto")
    content = json.loads(to_json(sweep, results_of(sweep, {})))
    assert [run["values"] for run in content["runs"]] == [{"parallel.layers": {}}, {"parallel.layers": "auto"}]
    named = planned("parallel.layers.classifier.1=column", "training.seed=0,1")
    content = json.loads(to_json(named, results_of(named, {})))
    assert [run["values"]["parallel.layers.classifier.1"] for run in content["runs"]] == ["column"] * 2


def test_texts_have_columns_of_perplexity(planned: Plan) -> None:
    sweep = planned("optimizer.learning_rate=0.1,0.2", "training.seed=0,1")
    ended = [
        replace(result, curve=result.curve and replace(result.curve, measure=PERPLEXITY))
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


ENDED = RunOutcome(RunStatus.ENDED, 0)


def results(grid: Grid, accuracies: Sequence[float | None]) -> list[RunResult]:
    """Results with these final accuracies; None is a run that has failed after an epoch with 99%."""
    return [
        RunResult(point, RunOutcome(RunStatus.FAILED, 1), Curve("failed", (1,), (1.0,), (0.99,)), 1.0)
        if share is None
        else RunResult(point, ENDED, Curve(point.label, (3,), (10.0,), (share,)), 100.0)
        for point, share in zip(grid.points(), accuracies, strict=True)
    ]


def test_a_result_is_read_from_the_metrics(planned: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = planned("rule.every=1,4")
    rows = [(1, 1.5, 1.0, 100.0, 0.5), (2, 3.0, 1.0, 300.0, 0.75), (3, 7.0, 2.0, 50.0, 0.75), (4, 9.0, 1.0, 100.0, 0.7)]
    names = ("epoch", "elapsed", "seconds", "samples_per_second", "test_accuracy")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (sweep.folder / "1-every=1").mkdir(parents=True)
    (sweep.folder / "1-every=1" / METRICS).write_text("\n".join([*lines, '{"epoch": 5, "el']))
    run, other = results_of(sweep, {"1-every=1": ENDED})
    assert run.final is not None
    assert (run.final.name, run.final.epochs[-1], run.final.seconds[-1], run.speed) == ("every=1", 4, 9.0, 120.0)
    assert (run.final.last, run.final.best, run.final.best_epoch) == (0.7, 0.75, 2)
    assert (other.curve, other.outcome) == (None, RunOutcome())


def test_the_best_run_is_one_that_ended_and_the_quicker_of_equal_ones() -> None:
    runs = results(parse_grid(["rule.every=1,2,3,4"]), [0.5, None, 0.75, 0.75])
    assert best_of(runs) is runs[2]
    slow = Curve("slow", (3,), (11.0,), (0.75,))
    assert best_of([runs[0], RunResult(runs[2].point, ENDED, slow), runs[3]]) is runs[3]
    assert best_of(runs[1:2]) is None


def over_seeds(grid: Grid, runs: Sequence[RunResult]) -> list[RunGroup]:
    return grouped(grid, runs, keys_beside_seed(grid))


def test_statistics_over_seeds() -> None:
    grid = parse_grid(["rule.every=1,4", "training.seed=0,1,2"])
    first, second = over_seeds(grid, results(grid, [0.9, 0.92, 0.94, 0.5, None, None]))
    assert (first.values, first.runs, first.finals) == (("1",), 3, (0.9, 0.92, 0.94))
    assert (first.mean, first.std) == (pytest.approx(0.92), pytest.approx(0.02))
    assert (second.values, second.mean, second.std, second.runs) == (("4",), 0.5, None, 3)
    grid = parse_grid(["training.seed=0,1"])
    assert [group.values for group in over_seeds(grid, results(grid, [0.5, 0.75]))] == [()]
    (nothing,) = over_seeds(grid, results(grid, [None, None]))
    assert (nothing.mean, nothing.std, nothing.runs) == (None, None, 2)


def test_without_swept_seeds_there_are_no_statistics(planned: Plan) -> None:
    sweep = planned("rule.every=1,4", "training.seed=1")
    assert len(tables(sweep.grid, [])) == 1
    assert "seeds" not in json.loads(to_json(sweep, results(sweep.grid, [0.5, 0.75])))


def test_texts_are_compared_by_their_perplexity(
    planned: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest is the best, though its accuracy is lower; a run that has diverged is the last."""
    monkeypatch.chdir(tmp_path)
    sweep = planned("optimizer.learning_rate=0.1,0.2,0.4")
    for point, perplexities in zip(sweep.grid.points(), ((9.0, 5.0), (6.0, 4.0), (3.0, inf)), strict=True):
        (sweep.folder / point.name).mkdir(parents=True)
        for epoch, perplexity in enumerate(perplexities, 1):
            speed = {"epoch": epoch, "elapsed": 1.0 * epoch, "seconds": 1.0, "samples_per_second": 1.0}
            metrics = {**speed, "test_accuracy": perplexity / 10, "test_perplexity": perplexity}
            add_metrics(sweep.folder / point.name, metrics)
    runs = results_of(sweep, {point.name: ENDED for point in sweep.grid.points()})
    assert shared_measure(runs) is PERPLEXITY
    assert [run.curve.last for run in runs if run.curve] == [5.0, 4.0, inf]
    assert [run.curve.best_epoch for run in runs if run.curve] == [2, 2, 1]
    assert best_of(runs) is runs[1]


def test_seeds_with_a_diverged_run_have_no_spread() -> None:
    grid = parse_grid(["training.seed=0,1"])
    (group,) = over_seeds(grid, results(grid, [4.0, inf]))
    assert (group.mean, group.std) == (inf, None)


def shares(drawn: HeatMap) -> list[list[float | None]]:
    return [[cell.share for cell in row] for row in drawn.cells]


def words(drawn: HeatMap) -> list[list[str]]:
    return [[cell.text for cell in row] for row in drawn.cells]


def test_two_keys_make_one_heat_map() -> None:
    grid = parse_grid(["rule.every=1,4", "optimizer.learning_rate=0.05,0.1,0.2"])
    (drawn,) = heat_maps(grid, results(grid, [0.1, 0.2, 0.3, 0.4, None, 0.5]))
    assert (drawn.title, drawn.keys) == ("", ("every", "learning_rate"))
    assert (drawn.rows, drawn.columns) == (("1", "4"), ("0.05", "0.1", "0.2"))
    assert words(drawn) == [["10.00%", "20.00%", "30.00%"], ["40.00%", "–", "50.00%"]]
    assert shares(drawn) == [[0.0, pytest.approx(0.25), pytest.approx(0.5)], [pytest.approx(0.75), None, 1.0]]


def test_one_key_makes_no_heat_map() -> None:
    grid = parse_grid(["rule.every=1,4", "training.epochs=3"])
    assert heat_maps(grid, results(grid, [0.1, 0.2])) == []


def test_other_keys_make_a_heat_map_for_each_combination() -> None:
    keys = ["rule.every=1,4", "optimizer.learning_rate=0.05,0.1", "optimizer.name=sgd,lars", "optimizer.momentum=0,0.9"]
    grid = parse_grid(keys)
    maps = heat_maps(grid, results(grid, [step / 16 for step in range(16)]))
    assert [drawn.title for drawn in maps] == [
        "name = sgd, momentum = 0",
        "name = sgd, momentum = 0.9",
        "name = lars, momentum = 0",
        "name = lars, momentum = 0.9",
    ]
    assert words(maps[1]) == [["6.25%", "31.25%"], ["56.25%", "81.25%"]]


def test_seeds_are_averaged_where_two_other_keys_are_swept() -> None:
    grid = parse_grid(["training.seed=0,1", "rule.every=1,4", "optimizer.learning_rate=0.05,0.1"])
    (drawn,) = heat_maps(grid, results(grid, [0.1, 0.2, 0.3, None, 0.3, 0.4, 0.5, None]))
    assert drawn.keys == ("every", "learning_rate")
    assert words(drawn) == [["20.00%", "30.00%"], ["40.00%", "–"]]
    grid = parse_grid(["training.seed=0,1", "rule.every=1,4"])
    (drawn,) = heat_maps(grid, results(grid, [0.1, 0.2, 0.3, 0.4]))
    assert drawn.keys == ("seed", "every")


def test_the_lowest_perplexity_is_the_darkest_and_a_diverged_run_has_no_color() -> None:
    grid = parse_grid(["rule.every=1,4", "optimizer.learning_rate=0.05,0.1"])
    ended = [
        replace(result, curve=result.curve and replace(result.curve, measure=PERPLEXITY))
        for result in results(grid, [4.0, 30.0, inf, None])
    ]
    (drawn,) = heat_maps(grid, ended)
    assert drawn.cells == [[HeatCell("4.00", 1.0), HeatCell("30.00", 0.0)], [HeatCell("inf"), HeatCell("–")]]


def test_runs_that_are_equal_are_all_the_best() -> None:
    grid = parse_grid(["rule.every=1,4", "optimizer.learning_rate=0.05,0.1"])
    (drawn,) = heat_maps(grid, results(grid, [0.5] * 4))
    assert shares(drawn) == [[1.0, 1.0], [1.0, 1.0]]
