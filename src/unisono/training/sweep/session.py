"""Session of a sweep: from its plan to its report, with the folder locked meanwhile."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from unisono.errors import UsageError
from unisono.formats import format_duration
from unisono.training.curves import draw, finite_part
from unisono.training.recipe_file import find_recipe
from unisono.training.run_directory import replace_file
from unisono.training.run_lock import RunLock
from unisono.training.sweep.directory import (
    OUTPUT,
    SWEEP,
    Outcomes,
    RunOutcome,
    RunStatus,
    Sweep,
    create_or_open,
    open_sweep,
)
from unisono.training.sweep.grid import GridPoint, parse_grid, read_recipes
from unisono.training.sweep.results import (
    ReportTable,
    RunResult,
    heat_maps,
    results_of,
    shared_measure,
    sweeps_seeds,
    tables,
    to_json,
    to_markdown,
)
from unisono.training.sweep.run import PROGRAM, exit_code, run_points
from unisono.view.chart import no_pictures
from unisono.view.heat_map import draw_heat_maps

MAX_TABLE_WIDTH = 1000
"""Most characters of a row of a table that is not printed on a terminal."""

REPORT, HEAT_MAP = "sweep.md", "heat_map.svg"


def plan_given(recipe: Path, changes: Sequence[str], ranks: int | None, folder: Path | None) -> Sweep:
    """Return the sweep that a command line describes; `changes` have the form key=a,b,c.

    Raises RecipeError for a point whose recipe cannot be run. Nothing is written.
    """
    grid = parse_grid(changes)
    recipes = read_recipes(find_recipe(recipe), grid, ranks)
    return Sweep(folder or Path("sweeps") / next(iter(recipes.values())).name, grid, recipes)


def run_session(given: Sweep | Path, program: Sequence[str] = PROGRAM) -> int:
    """Make the runs of a sweep that have not ended; `given` is its plan, or the folder of one to resume.

    Return the exit code: 0 where all runs have ended, 128 + N after signal N, else 1. Raises UsageError where the
    folder is in use, or has another sweep.
    """
    folder = given if isinstance(given, Path) else given.folder
    if isinstance(given, Path):
        open_sweep(given)  # before anything is written there
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the sweep's folder {folder}: {error.strerror}") from error
    lock = RunLock()
    try:
        lock.take(folder)
        sweep, outcomes = open_sweep(given) if isinstance(given, Path) else create_or_open(given)
        return _make(sweep, outcomes, program)
    finally:
        lock.release()


def _make(sweep: Sweep, outcomes: Outcomes, program: Sequence[str]) -> int:
    """Make the runs and write the report. Return the exit code."""
    points, folder = sweep.grid.points(), sweep.folder

    def results() -> list[RunResult]:
        found = results_of(sweep, outcomes)
        replace_file(folder / SWEEP, to_json(sweep, found).encode())
        return found

    def record(point: GridPoint, outcome: RunOutcome) -> None:
        outcomes[point.name] = outcome
        number = points.index(point)
        line = _line(sweep, results()[number])
        _log(f"{number + 1:>{len(str(len(points)))}}/{len(points)}  {point.label}  {line}")

    results()
    done = [point for point in points if sweep.is_done(point, outcomes[point.name])]
    begun = [point for point in points if point not in done and sweep.is_begun(point)]
    _log(f"{len(points)} runs into {folder}; each writes its output to NAME/{OUTPUT}")
    if done or begun:
        _log(f"{len(done)} have ended before, {len(begun)} are resumed")
    received = run_points(sweep, outcomes, record, program)
    _report(sweep, results())
    code = exit_code(outcomes, received)
    if received is not None and code:
        _log(f"stopped by {signal.Signals(received).name}; resume with: unisono sweep --resume {folder}")
    return code


def _line(sweep: Sweep, result: RunResult) -> str:
    """Return what is said of a run at its end."""
    if (run := result.final) is not None:
        return f"{run.measure.title} {run.measure.words(run.last)}  {format_duration(run.seconds[-1])}"
    outcome = result.outcome
    output = sweep.folder / result.point.name / OUTPUT
    return outcome.words + (f": {outcome.error}  ({output})" if outcome.status is RunStatus.FAILED else "")


def _report(sweep: Sweep, results: Sequence[RunResult]) -> None:
    """Write pictures and page, and print the tables."""
    missing, charts = no_pictures(), dict[str, bytes]()
    if missing:
        _log(missing)
    else:
        charts = _pictures(sweep, results)
    for name, picture in charts.items():
        replace_file(sweep.folder / name, picture)
    replace_file(sweep.folder / REPORT, to_markdown(sweep, results, list(charts)).encode())
    for table in tables(sweep.grid, results):
        _print(table)
    _log(f"sweep: {sweep.folder / REPORT}")


def _pictures(sweep: Sweep, results: Sequence[RunResult]) -> dict[str, bytes]:
    """Return the pictures by the names of their files."""
    measure, found = shared_measure(results), dict[str, bytes]()
    if maps := heat_maps(sweep.grid, results):
        seeds = ", mean over seeds" if sweeps_seeds(sweep.grid) and len(sweep.grid.swept) > 2 else ""
        found[HEAT_MAP] = draw_heat_maps(maps, f"{sweep.name}: {measure.title} after the last epoch{seeds}")
    curves = [finite_part(result.curve) for result in results if result.curve is not None]
    if drawn := [curve for curve in curves if curve.epochs]:
        found[f"{measure.name}.svg"] = draw(drawn, f"{sweep.name}: {measure.title}")
    return found


def to_rich(table: ReportTable) -> Table:
    """Return a table for the screen; the best row is bold."""
    shown = Table(title=table.title, title_justify="left")
    for number, name in enumerate(table.header):
        last = number == len(table.header) - 1
        shown.add_column(name, justify="left" if last else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        shown.add_row(*row, style="bold" if number == table.best else None)
    return shown


def _print(table: ReportTable) -> None:
    console, shown = _console(), to_rich(table)
    if not console.is_terminal:  # a file has no width that the table must fit into
        console.width = Measurement.get(console, console.options.update(max_width=MAX_TABLE_WIDTH), shown).maximum
    console.print(shown, soft_wrap=False)


def _log(line: str) -> None:
    console = _console()
    console.print(line, markup=False)
    console.file.flush()


def _console() -> Console:
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)
