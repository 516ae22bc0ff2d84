"""Grid of a sweep as data: its axes, and a point for each run; the directory of a sweep.

    --set rule.every=1,4 --set optimizer.learning_rate=0.05,0.1 --set training.epochs=3

    1-every=1-learning_rate=0.05        3-every=4-learning_rate=0.05
    2-every=1-learning_rate=0.1         4-every=4-learning_rate=0.1

The points are the product of the axes in the order of the options; the values of the last axis change fastest. An axis
with one value is a plain change: names of points leave it out.

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

import itertools
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import tomli_w

from unisono.errors import RecipeError, UsageError
from unisono.files import naming_os_errors
from unisono.tables import flat
from unisono.training.recipe import Recipe, read_recipe, renamed_change, to_dict
from unisono.training.recipe_check import check_run
from unisono.training.run_directory import METRICS, RECIPE, replace_file

MAX_NAME_CHARACTERS = 120
"""Most characters of a point's name, which is the name of its folder."""


class GridPoint(NamedTuple):
    """One run: its value of each axis."""

    name: str
    """Name of the run's folder; unique in the grid."""
    label: str
    """Swept keys and values, for tables and diagrams."""
    changes: tuple[str, ...]
    """Changes to the recipe, of the form key=value, one for each axis."""
    values: tuple[str, ...]
    """Values of the swept axes."""


@dataclass(frozen=True)
class Grid:
    """Axes of a sweep, at least one of them with two values or more."""

    axes: Mapping[str, tuple[str, ...]]
    """Keys of a recipe and their values, as text in the order given."""

    def __str__(self) -> str:
        return " ".join(f"{key}={','.join(values)}" for key, values in self.axes.items())

    @property
    def swept(self) -> dict[str, tuple[str, ...]]:
        """Axes with two values or more."""
        return {key: values for key, values in self.axes.items() if len(values) > 1}

    @property
    def short_keys(self) -> dict[str, str]:
        """Shortest unambiguous name of each swept key: the part behind the dot, or the whole key."""
        ends = {key: key.rpartition(".")[2] for key in self.swept}
        return {key: end if [*ends.values()].count(end) == 1 else key for key, end in ends.items()}

    def points(self) -> tuple[GridPoint, ...]:
        short, points = self.short_keys, list[GridPoint]()
        combinations = list(itertools.product(*self.axes.values()))
        digits = len(str(len(combinations)))
        for index, values in enumerate(combinations, start=1):
            settings = list(zip(self.axes, values, strict=True))
            shown = [f"{short[key]}={value}" for key, value in settings if key in short]
            name = re.sub(r"[^\w.=+-]", "_", "-".join([f"{index:0{digits}}", *shown]), flags=re.ASCII)
            changes = tuple(f"{key}={value}" for key, value in settings)
            swept = tuple(value for key, value in settings if key in short)
            # the number leads, so that shortened names differ too
            points.append(GridPoint(name[:MAX_NAME_CHARACTERS], ", ".join(shown), changes, swept))
        return tuple(points)


def parse_grid(changes: Sequence[str]) -> Grid:
    """Return the grid of options of the form key=a,b,c. Raises RecipeError naming the option where its form is wrong, a
    key or a value is there twice, or nothing is swept."""
    axes: dict[str, tuple[str, ...]] = {}
    for given in changes:
        key, equals, text = (part.strip() for part in renamed_change(given).partition("="))
        if not equals or not key:
            raise RecipeError(f"--set {given}: not of the form key=a,b,c, as in rule.every=1,4,16")
        values = tuple(value.strip() for value in text.split(","))
        for value in values:
            _check_value(given, value, values)
        if key in axes:
            raise RecipeError(f"--set {given}: {key} is set twice; use one --set {key}=a,b")
        axes[key] = values
    grid = Grid(axes)
    if not grid.swept:
        raise RecipeError(
            "nothing to sweep: no --set has several values, as in --set optimizer.learning_rate=0.05,0.1; "
            "unisono train makes a single run"
        )
    return grid


def _check_value(given: str, value: str, values: Sequence[str]) -> None:
    if not value:
        raise RecipeError(f"--set {given}: a value is empty; write '\"\"' for an empty string")
    try:
        tomllib.loads(f"value = {value}" if value[0] in "\"'[{" else "")
    except tomllib.TOMLDecodeError as error:
        reason = f"{value} is no value of TOML; a swept value cannot contain a comma"
        raise RecipeError(f"--set {given}: {reason}") from error
    if values.count(value) > 1:
        raise RecipeError(f"--set {given}: the value {value} is there twice; give each value once")


def read_recipes(path: Path, grid: Grid, ranks: int | None = None) -> dict[str, Recipe]:
    """Return the recipe of each point, by the point's name; `ranks` overrides theirs. Raises RecipeError for an unknown
    key, a wrong value, a recipe that its ranks cannot run, and two equal points."""
    if ranks is not None and "ranks" in grid.axes:
        raise RecipeError(f"--ranks {ranks}, but --set gives ranks too; omit one of them")
    more = [] if ranks is None else [f"ranks={ranks}"]
    points: dict[Recipe, GridPoint] = {}
    for point in grid.points():
        recipe = read_recipe(path, [*more, *point.changes])
        check_run(recipe, recipe.ranks)
        if recipe in points:
            raise RecipeError(f"{points[recipe].label} and {point.label} are the same run; give each value once")
        points[recipe] = point
    return {point.name: recipe for recipe, point in points.items()}


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
        return next(iter(self.recipes.values())).name

    def recipe_file(self, point: GridPoint) -> Path:
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
        grid = Grid({key: tuple(values) for key, values in content["grid"].items()})
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
    """Return the sweep in the folder of `given`, which becomes that of `given` if there is none. Raises UsageError for
    another sweep, for runs without one, and where the folder cannot be read or written."""
    with naming_os_errors(f"cannot read {given.folder / SWEEP}"):
        exists = (given.folder / SWEEP).exists()
    if exists:
        stored, outcomes = open_sweep(given.folder)
        check_same(stored, given)
        return stored, outcomes
    points = given.grid.points()
    if begun := [point.name for point in points if given.is_begun(point)]:
        raise UsageError(f"{given.folder / begun[0]} holds a run, but there is no {SWEEP}; name another --folder")
    with naming_os_errors(f"cannot create the sweep's folder {given.folder}"):
        (given.folder / RECIPES).mkdir(parents=True, exist_ok=True)
    for point in points:
        replace_file(given.recipe_file(point), tomli_w.dumps(to_dict(given.recipes[point.name])).encode())
    return given, {point.name: RunOutcome() for point in points}


def check_same(stored: Sweep, given: Sweep) -> None:
    """Raise UsageError, naming the difference, where the sweep on the disk is not the one that was given."""
    remedy = f"resume it with --resume {stored.folder}, or start this one in another --folder"
    if list(stored.grid.axes.items()) != list(given.grid.axes.items()):
        raise UsageError(f"{stored.folder} holds a sweep over {stored.grid}, not {given.grid}; {remedy}")
    for name, recipe in given.recipes.items():
        old, new = flat(to_dict(stored.recipes[name])), flat(to_dict(recipe))
        changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if changed := [f"{key} = {old.get(key)!r}, not {new.get(key)!r}" for key in changed]:
            raise UsageError(f"{stored.folder} holds a sweep of another recipe ({'; '.join(changed)}); {remedy}")
