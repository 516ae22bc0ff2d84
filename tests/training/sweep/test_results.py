from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

import pytest

from unisono.training.measures import ACCURACY, PERPLEXITY
from unisono.training.run_directory import METRICS, add_metrics, read_metrics
from unisono.training.sweep.directory import RunOutcome, RunStatus, Sweep
from unisono.training.sweep.plan import Grid, parse_grid
from unisono.training.sweep.results import (
    RunResult,
    RunSummary,
    best_of,
    results_of,
    seed_statistics,
    shared_measure,
    summary_of,
)

ENDED = RunOutcome(RunStatus.ENDED, 0)


def results(grid: Grid, accuracies: Sequence[float | None]) -> list[RunResult]:
    """Results with these final accuracies; None is a run that has failed after an epoch with 99%."""
    failed = RunResult(grid.points()[0], RunOutcome(RunStatus.FAILED, 1), RunSummary(1, 0.99, 0.99, 1, 1.0, 1.0))
    return [
        RunResult(point, failed.outcome, failed.summary)
        if share is None
        else RunResult(point, ENDED, RunSummary(3, share, share, 3, 10.0, 100.0))
        for point, share in zip(grid.points(), accuracies, strict=True)
    ]


def test_a_summary_is_read_from_the_metrics(tmp_path: Path) -> None:
    assert summary_of([], ACCURACY) is None
    rows = [(1, 1.5, 1.0, 100.0, 0.5), (2, 3.0, 1.0, 300.0, 0.75), (3, 7.0, 2.0, 50.0, 0.75), (4, 9.0, 1.0, 100.0, 0.7)]
    names = ("epoch", "elapsed", "seconds", "samples_per_second", "test_accuracy")
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (tmp_path / METRICS).write_text("\n".join([*lines, '{"epoch": 5, "el']))
    assert summary_of(read_metrics(tmp_path), ACCURACY) == RunSummary(4, 0.7, 0.75, 2, 9.0, 120.0)


def test_the_best_run_is_one_that_ended_and_the_quicker_of_equal_ones() -> None:
    found = results(parse_grid(["rule.every=1,2,3,4"]), [0.5, None, 0.75, 0.75])
    assert best_of(found) is found[2]
    slow = RunSummary(3, 0.75, 0.75, 3, 11.0, 100.0)
    assert best_of([found[0], RunResult(found[2].point, ENDED, slow), found[3]]) is found[3]
    assert best_of(found[1:2]) is None


def test_statistics_over_seeds() -> None:
    grid = parse_grid(["rule.every=1,4", "training.seed=0,1,2"])
    one, other = seed_statistics(grid, results(grid, [0.9, 0.92, 0.94, 0.5, None, None]))
    assert (one.values, one.runs, one.finals) == (("1",), 3, (0.9, 0.92, 0.94))
    assert (one.mean, one.std) == (pytest.approx(0.92), pytest.approx(0.02))
    assert (other.values, other.mean, other.std, other.runs) == (("4",), 0.5, None, 3)
    grid = parse_grid(["training.seed=0,1"])
    assert [group.values for group in seed_statistics(grid, results(grid, [0.5, 0.75]))] == [()]
    (nothing,) = seed_statistics(grid, results(grid, [None, None]))
    assert (nothing.mean, nothing.std, nothing.runs) == (None, None, 2)


def test_without_swept_seeds_there_are_no_statistics() -> None:
    grid = parse_grid(["rule.every=1,4", "training.seed=1"])
    assert seed_statistics(grid, results(grid, [0.5, 0.75])) == []


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
    found = results_of(sweep, {point.name: ENDED for point in sweep.grid.points()})
    assert shared_measure(found) is PERPLEXITY
    assert [run.summary.value for run in found if run.summary] == [5.0, 4.0, inf]
    assert [run.summary.best_epoch for run in found if run.summary] == [2, 2, 1]
    assert best_of(found) is found[1]


def test_seeds_with_a_diverged_run_have_no_spread() -> None:
    grid = parse_grid(["training.seed=0,1"])
    (group,) = seed_statistics(grid, results(grid, [4.0, inf]))
    assert (group.mean, group.std) == (inf, None)
