"""Session of a sweep: from its plan to its report, with the folder locked meanwhile."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement

from unisono.errors import UsageError
from unisono.training.curves import curves_of, finite_part
from unisono.training.recipe_file import find_recipe
from unisono.training.run_directory import replace_file
from unisono.training.run_lock import RunLock
from unisono.training.sweep import report
from unisono.training.sweep.directory import (
    OUTPUT,
    SWEEP,
    RunOutcome,
    RunStatus,
    Sweep,
    check_same,
    create_sweep,
    holds_sweep,
    is_begun,
    is_done,
    open_sweep,
)
from unisono.training.sweep.heat_map import draw_heat_maps, heat_maps
from unisono.training.sweep.measure_chart import draw_measure
from unisono.training.sweep.plan import GridPoint, parse_grid, read_recipes
from unisono.training.sweep.report import SEED, RunResult, results_of, shared_measure
from unisono.training.sweep.run import PROGRAM, exit_code, run_points

MAX_TABLE_WIDTH = 1000
"""Most characters of a row of a table that is not printed on a terminal."""

REPORT, HEAT_MAP = "sweep.md", "heat_map.svg"


def plan_given(recipe: Path, changes: Sequence[str], ranks: int | None, folder: Path | None) -> Sweep:
    """Return the sweep that a command line describes; `changes` have the form key=a,b,c.

    Raises RecipeError for a point whose recipe cannot be run. Nothing is written.
    """
    grid = parse_grid(changes)
    recipes = read_recipes(find_recipe(recipe), grid, ranks)
    name = next(iter(recipes.values())).name
    return Sweep(folder or Path("sweeps") / name, grid, recipes)


def run_session(given: Sweep | Path, program: Sequence[str] = PROGRAM) -> int:
    """Make the runs of a sweep that have not ended; `given` is its plan, or the folder of one to resume.

    Return the exit code: 0 where all runs have ended, 128 + N after signal N, else 1. Raises UsageError where the
    folder is in use, or has another sweep.
    """
    folder = given if isinstance(given, Path) else given.folder
    lock = RunLock()
    try:
        if isinstance(given, Path):
            open_sweep(given)  # before anything is written there
        _lock(lock, folder)
        return _ActiveSweep(*_open(given), program).run()
    finally:
        lock.release()


def _lock(lock: RunLock, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the sweep's folder {folder}: {error.strerror}") from error
    lock.take(folder)


def _open(given: Sweep | Path) -> tuple[Sweep, dict[str, RunOutcome]]:
    """Return the sweep and its outcomes so far; a new one is created."""
    if isinstance(given, Path):
        return open_sweep(given)
    if holds_sweep(given.folder):
        there, outcomes = open_sweep(given.folder)
        check_same(there, given)
        return there, outcomes
    create_sweep(given)
    return given, {point.name: RunOutcome() for point in given.grid.points()}


class _ActiveSweep:
    """Sweep while its runs are made."""

    def __init__(self, sweep: Sweep, outcomes: dict[str, RunOutcome], program: Sequence[str]) -> None:
        self._sweep, self._outcomes, self._program = sweep, outcomes, program
        self._points = sweep.grid.points()
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def run(self) -> int:
        """Make the runs and write the report. Return the exit code."""
        self._begin()
        received = run_points(self._sweep, self._outcomes, self._record, self._program)
        results = results_of(self._sweep, self._outcomes)
        self._write_report(results)
        self._print_report(results)
        code = exit_code(self._outcomes, received)
        if received is not None and code:
            name = signal.Signals(received).name
            self._log(f"stopped by {name}; resume with: unisono sweep --resume {self._sweep.folder}")
        return code

    def _begin(self) -> None:
        sweep = self._sweep
        done = [point for point in self._points if is_done(sweep, point, self._outcomes[point.name])]
        begun = [point for point in self._points if point not in done and is_begun(sweep, point)]
        self._write_results(results_of(sweep, self._outcomes))
        self._log(f"{len(self._points)} runs into {sweep.folder}; each writes its output to NAME/{OUTPUT}")
        if done or begun:
            self._log(f"{len(done)} have ended before, {len(begun)} are resumed")

    def _record(self, point: GridPoint, outcome: RunOutcome) -> None:
        """Write the outcome of a run that has ended, and print a line."""
        self._outcomes[point.name] = outcome
        results = results_of(self._sweep, self._outcomes)
        self._write_results(results)
        number = self._points.index(point)
        result = results[number]
        words = report.ending(result)
        if result.final is not None:
            measure = result.final.measure
            value = f"{measure.title} {measure.words(result.final.value)}"
            words = f"{value}  {report.duration(result.final.seconds)}"
        if outcome.status is RunStatus.FAILED:
            words += f": {outcome.error}  ({self._sweep.folder / point.name / OUTPUT})"
        count = len(self._points)
        self._log(f"{number + 1:>{len(str(count))}}/{count}  {point.label}  {words}")

    def _write_results(self, results: Sequence[RunResult]) -> None:
        replace_file(self._sweep.folder / SWEEP, report.to_json(self._sweep, results).encode())

    def _write_report(self, results: Sequence[RunResult]) -> None:
        """Write the diagrams and the page."""
        grid, folder, diagrams = self._sweep.grid, self._sweep.folder, list[str]()
        name, measure = next(iter(self._sweep.recipes.values())).name, shared_measure(results)
        maps = heat_maps(grid, results)
        if maps:
            seeds = len(grid.swept) > 2 and any(axis.key == SEED for axis in grid.swept)
            title = f"{name}: {measure.title} after the last epoch{', mean over seeds' if seeds else ''}"
            replace_file(folder / HEAT_MAP, draw_heat_maps(maps, measure, title).encode())
            diagrams.append(HEAT_MAP)
        begun = [result.point for result in results if result.summary is not None]
        named = zip(begun, curves_of([folder / point.name for point in begun]), strict=True)
        curves = [replace(drawn, name=point.label) for point, each in named if (drawn := finite_part(each)).epochs]
        if curves:
            chart = f"{measure.name}.svg"
            replace_file(folder / chart, draw_measure(curves, f"{name}: {measure.title} against time").encode())
            diagrams.append(chart)
        replace_file(folder / REPORT, report.to_markdown(self._sweep, results, diagrams).encode())

    def _print_report(self, results: Sequence[RunResult]) -> None:
        for table in report.tables(self._sweep.grid, results):
            shown = report.to_rich(table)
            if not self._console.is_terminal:  # a file has no width that the table must fit into
                natural = Measurement.get(self._console, self._console.options.update(max_width=MAX_TABLE_WIDTH), shown)
                self._console.width = natural.maximum
            self._console.print(shown, soft_wrap=False)
        self._log(f"sweep: {self._sweep.folder / REPORT}")

    def _log(self, line: str) -> None:
        self._console.print(line, markup=False)
        self._console.file.flush()
