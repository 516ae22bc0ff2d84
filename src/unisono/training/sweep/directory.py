"""Directory of a sweep: its grid and results, the recipe of each run, and a run's directory for each point.

sweeps/digits/
├── sweep.json                            grid, and the result of each run
├── sweep.md
├── heat_map.svg
├── accuracy.svg
├── .lock                                 while a sweep uses the directory: the process
├── recipes/
│   └── 1-every=1-learning_rate=0.05.toml
└── 1-every=1-learning_rate=0.05/         directory of a run, and output.txt
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import tomli_w

from unisono.errors import UsageError
from unisono.tables import flat
from unisono.training.recipe import Recipe, to_dict
from unisono.training.recipe_file import read_recipe
from unisono.training.run_directory import METRICS, RECIPE, replace_file
from unisono.training.sweep.grid import Grid, GridAxis, GridPoint

SWEEP, RECIPES, OUTPUT = "sweep.json", "recipes", "output.txt"


class RunStatus(StrEnum):
    """State of a run of a sweep."""

    WAITING = "waiting"
    ENDED = "ended"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class RunOutcome(NamedTuple):
    """End of a run's process."""

    status: RunStatus = RunStatus.WAITING
    exit_code: int | None = None
    """Exit code of `unisono train`, 128 + N after signal N; None before the run."""
    error: str = ""
    """Last error line of a run that failed."""

    @property
    def words(self) -> str:
        """Outcome in a few words."""
        return f"failed, exit code {self.exit_code}" if self.status is RunStatus.FAILED else str(self.status)


Outcomes = dict[str, RunOutcome]
"""Outcome of each run so far, by the name of its point."""


@dataclass(frozen=True)
class Sweep:
    """Sweep in a folder."""

    folder: Path
    grid: Grid
    recipes: Mapping[str, Recipe]
    """Recipe of each point, by the point's name."""

    @property
    def name(self) -> str:
        """Name of its recipes."""
        return next(iter(self.recipes.values())).name

    def recipe_file(self, point: GridPoint) -> Path:
        """Return the path of a point's recipe."""
        return self.folder / RECIPES / f"{point.name}.toml"

    def is_begun(self, point: GridPoint) -> bool:
        """Return True if there is a run to resume."""
        return (self.folder / point.name / RECIPE).exists()

    def is_done(self, point: GridPoint, outcome: RunOutcome) -> bool:
        """Return True if a run has ended and its metrics are still there."""
        return outcome.status is RunStatus.ENDED and (self.folder / point.name / METRICS).exists()


def open_sweep(folder: Path) -> tuple[Sweep, Outcomes]:
    """Return the sweep in a folder. Raises UsageError where there is none, or it cannot be read."""
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text())
        grid = Grid(tuple(GridAxis(key, tuple(values)) for key, values in content["grid"].items()))
        outcomes = {
            run["name"]: RunOutcome(RunStatus(run["status"]), run["exit_code"], run["error"]) for run in content["runs"]
        }
    except FileNotFoundError as error:
        raise UsageError(f"{folder} holds no sweep: there is no {SWEEP} in it") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} does not describe a sweep ({error!r}); name another --folder") from error
    recipes = {name: read_recipe(folder / RECIPES / f"{name}.toml") for name in outcomes}
    if list(outcomes) != [point.name for point in grid.points()]:
        raise UsageError(f"the runs in {path} are not those of its grid; start a new sweep in another --folder")
    return Sweep(folder, grid, recipes), outcomes


def create_or_open(given: Sweep) -> tuple[Sweep, Outcomes]:
    """Return the sweep in the folder of `given`, which becomes that of `given` if there is none.

    Raises UsageError where another sweep is there, or runs without one, or the folder cannot be read or written.
    """
    try:
        there = (given.folder / SWEEP).exists()
    except OSError as error:
        raise UsageError(f"cannot read {given.folder / SWEEP}: {error.strerror}") from error
    if there:
        found, outcomes = open_sweep(given.folder)
        check_same(found, given)
        return found, outcomes
    _write_recipes(given)
    return given, {point.name: RunOutcome() for point in given.grid.points()}


def check_same(there: Sweep, given: Sweep) -> None:
    """Raise UsageError, naming the difference, where the sweep on the disk is not the one that was given."""
    remedy = f"resume it with --resume {there.folder}, or start this one in another --folder"
    if there.grid != given.grid:
        raise UsageError(f"{there.folder} holds a sweep over {there.grid}, not {given.grid}; {remedy}")
    for name, recipe in given.recipes.items():
        old, new = flat(to_dict(there.recipes[name])), flat(to_dict(recipe))
        if changed := [f"{key} = {old[key]!r}, not {new[key]!r}" for key in new if old[key] != new[key]]:
            raise UsageError(f"{there.folder} holds a sweep of another recipe ({'; '.join(changed)}); {remedy}")


def _write_recipes(sweep: Sweep) -> None:
    points = sweep.grid.points()
    if begun := [point.name for point in points if sweep.is_begun(point)]:
        raise UsageError(f"{sweep.folder / begun[0]} holds a run, but there is no {SWEEP}; name another --folder")
    try:
        (sweep.folder / RECIPES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the sweep's folder {sweep.folder}: {error.strerror}") from error
    for point in points:
        replace_file(sweep.recipe_file(point), tomli_w.dumps(to_dict(sweep.recipes[point.name])).encode())
