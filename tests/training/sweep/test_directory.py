from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import UsageError
from unisono.training.run_directory import METRICS, RECIPE
from unisono.training.sweep.grid import (
    SWEEP,
    RunOutcome,
    RunStatus,
    Sweep,
    check_same,
    create_or_open,
    open_sweep,
)
from unisono.training.sweep.results import results_of, to_json
from unisono.training.sweep.run import plan_given

Plan = Callable[..., Sweep]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(sweep: Sweep, outcomes: dict[str, RunOutcome]) -> None:
    create_or_open(sweep)
    (sweep.folder / SWEEP).write_text(to_json(sweep, results_of(sweep, outcomes)))


CHANGES = ("rule.every=1,4", "optimizer.learning_rate=1e-1,0.05", "training.epochs=2")


def test_a_sweep_is_read_back(planned: Plan) -> None:
    sweep = planned(*CHANGES)
    names = [point.name for point in sweep.grid.points()]
    outcomes = dict.fromkeys(names, RunOutcome())
    outcomes[names[0]] = RunOutcome(RunStatus.ENDED, 0)
    outcomes[names[1]] = RunOutcome(RunStatus.FAILED, 9, "unisono: rank 1 is dead")
    assert create_or_open(sweep) == (sweep, dict.fromkeys(names, RunOutcome()))
    write(sweep, outcomes)
    assert open_sweep(sweep.folder) == (sweep, outcomes)
    assert create_or_open(planned(*CHANGES)) == (sweep, outcomes)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (("rule.every=1,4,16",), "holds a sweep over rule.every=1,4, not rule.every=1,4,16; resume it with --resume"),
        (("rule.every=4,1",), "not rule.every=4,1"),
        (("rule.every=1,4", "training.epochs=2"), "not rule.every=1,4 training.epochs=2"),
    ],
)
def test_another_grid_is_refused(planned: Plan, changes: tuple[str, ...], error: str) -> None:
    with pytest.raises(UsageError, match=re.escape(error)):
        check_same(planned("rule.every=1,4"), planned(*changes))


def test_another_recipe_is_refused(planned: Plan) -> None:
    given = plan_given(Path("digits"), ["rule.every=1,4"], 3, Path("sweep"))
    with pytest.raises(UsageError, match=r"holds a sweep of another recipe \(ranks = 2, not 3\)"):
        check_same(planned("rule.every=1,4"), given)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ({"fc": "column"}, {}, "parallel.layers.fc = 'column', not None"),
        ({}, "auto", "parallel.layers = None, not 'auto'"),
        ("auto", {}, "parallel.layers = 'auto', not None"),
    ],
)
def test_other_layers_are_another_recipe(planned: Plan, old: Any, new: Any, error: str) -> None:
    def split(layers: Any) -> Sweep:
        sweep = planned("rule.every=1,4")
        recipes = {
            name: replace(each, parallel=replace(each.parallel, layers=layers)) for name, each in sweep.recipes.items()
        }
        return replace(sweep, recipes=recipes)

    with pytest.raises(UsageError, match=re.escape(error)):
        check_same(split(old), split(new))


def test_a_run_without_its_sweep_is_left_alone(planned: Plan) -> None:
    sweep = planned("rule.every=1,4")
    (sweep.folder / "2-every=4").mkdir(parents=True)
    (sweep.folder / "2-every=4" / RECIPE).touch()
    with pytest.raises(UsageError, match=r"sweep/2-every=4 holds a run, but there is no sweep\.json; name another"):
        create_or_open(sweep)


def test_what_is_no_sweep_is_reported(planned: Plan) -> None:
    with pytest.raises(UsageError, match=r"nowhere holds no sweep: there is no sweep\.json in it"):
        open_sweep(Path("nowhere"))
    sweep = planned("rule.every=1,4")
    write(sweep, {})
    text = (sweep.folder / SWEEP).read_text()
    for broken in ("{", "[]", '{"grid": {}}', text.replace("waiting", "lost")):
        (sweep.folder / SWEEP).write_text(broken)
        with pytest.raises(UsageError, match=r"sweep/sweep\.json does not describe a sweep"):
            open_sweep(sweep.folder)
    content = json.loads(text)
    content["runs"].pop()
    (sweep.folder / SWEEP).write_text(json.dumps(content))
    with pytest.raises(UsageError, match="are not those of its grid"):
        open_sweep(sweep.folder)


def test_the_state_of_a_run(planned: Plan) -> None:
    sweep = planned("rule.every=1,4")
    create_or_open(sweep)
    point, ended = sweep.grid.points()[0], RunOutcome(RunStatus.ENDED, 0)
    assert (sweep.is_begun(point), sweep.is_done(point, ended)) == (False, False)
    (sweep.folder / point.name).mkdir()
    for name in (RECIPE, METRICS):
        (sweep.folder / point.name / name).touch()
    assert (sweep.is_begun(point), sweep.is_done(point, ended)) == (True, True)
    assert not sweep.is_done(point, RunOutcome(RunStatus.INTERRUPTED, 143))
