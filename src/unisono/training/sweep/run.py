"""Runs of a sweep, one after another, each a process of its own: a crash, a kill or an MPI abort ends one run only.

signal to the sweep         signal to the run      effect
SIGTERM, SIGINT, SIGHUP     SIGTERM                the run saves a checkpoint and ends; no other run is started
SIGUSR1                     SIGUSR1                the run saves a checkpoint and continues

A run has a process group of its own. So Ctrl-C in a terminal reaches the sweep only, and the run is saved.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from unisono.files import naming_os_errors
from unisono.formats import format_duration
from unisono.training.measures import draw, finite_part
from unisono.training.recipe import find_recipe
from unisono.training.run_directory import RunLock, replace_file
from unisono.training.sweep import grid
from unisono.training.sweep.grid import OUTPUT, GridPoint, Outcomes, RunOutcome, RunStatus, Sweep
from unisono.training.sweep.results import (
    SEED,
    ReportTable,
    RunResult,
    heat_maps,
    results_of,
    shared_measure,
    tables,
    to_json,
    to_markdown,
)
from unisono.view.chart import no_pictures
from unisono.view.heat_map import draw_heat_maps

PROGRAM = (sys.executable, "-P", "-m", "unisono")

STOPPED = (129, 130, 143)
"""Exit codes of `unisono train` after SIGINT and SIGTERM."""

ERROR_LINES = (re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b"), re.compile(r"unisono: "))
"""Beginnings of error lines, the most telling first: the end of a traceback, a message of Unisono."""

RANK = re.compile(r"^\s*rank \d+ of \d+: ")
"""Beginning of the lines of one rank."""

Record = Callable[[GridPoint, RunOutcome], None]


def run_points(
    sweep: Sweep, outcomes: Mapping[str, RunOutcome], record: Record, program: Sequence[str] = PROGRAM
) -> int | None:
    """Make the runs that have not ended by `program`, the command that has `train`, and call `record` with the outcome
    of each as it ends. Return the signal that stopped the sweep; None where none did."""
    with StopSignals() as signals:
        for point in sweep.grid.points():
            if signals.received is None and not sweep.is_done(point, outcomes[point.name]):
                record(point, _run(sweep, point, program, signals))
        return signals.received


def exit_code(outcomes: Mapping[str, RunOutcome], received: int | None) -> int:
    """Return the exit code of the sweep: 0 where all runs have ended, 128 + N after signal N, else 1."""
    if all(outcome.status is RunStatus.ENDED for outcome in outcomes.values()):
        return 0
    return 1 if received is None else 128 + received


def _run(sweep: Sweep, point: GridPoint, program: Sequence[str], signals: StopSignals) -> RunOutcome:
    """Make or resume a run, with its output appended to its file. Raises UsageError where that cannot be written."""
    folder = sweep.folder / point.name
    path, arguments = folder / OUTPUT, ["train", str(sweep.recipe_file(point)), f"--run={folder}"]
    if sweep.is_begun(point):
        arguments = ["train", f"--resume={folder}"]
    remedy = f"; repair that, then resume with --resume {sweep.folder}"
    with naming_os_errors(f"cannot run {point.name}: {path}", remedy=remedy):
        folder.mkdir(exist_ok=True)
        with path.open("a+b") as output:
            output.write(f"$ unisono {' '.join(arguments)}\n".encode())
            output.flush()
            begin = output.seek(0, os.SEEK_END)
            handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the run's, too, until it has one of its own
            process = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must not end the run before it is saved
            )
            signal.signal(signal.SIGUSR1, handler)
            code = signals.wait(process)
            output.seek(begin)
            return outcome_of(code, output.read().decode(errors="replace"))


def outcome_of(code: int, output: str) -> RunOutcome:
    if code == 0:
        return RunOutcome(RunStatus.ENDED, code)
    if code in STOPPED:
        return RunOutcome(RunStatus.INTERRUPTED, code)
    return RunOutcome(RunStatus.FAILED, code, error_line(output))


def error_line(output: str) -> str:
    """Return the last line of an output that names an error, else its last line; empty where there is none.

    >>> error_line("epoch 1/3\\nrank 1 of 2: ValueError: no such class\\n===== BAD TERMINATION =====")
    'ValueError: no such class'
    """
    lines = [RANK.sub("", line).strip() for line in output.splitlines() if line.strip()]
    for pattern in ERROR_LINES:
        if errors := [line for line in lines if pattern.match(line)]:
            return errors[-1]
    return lines[-1] if lines else ""


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Signal handlers within a block; signals that were ignored before, as by nohup, stay ignored."""

    def __init__(self) -> None:
        self.received: int | None = None
        """First signal that requested the end of the sweep; None before."""
        self._process: subprocess.Popen[bytes] | None = None
        self._earlier: dict[int, object] = {}

    def __enter__(self) -> Self:
        for signum in (*STOPPING, signal.SIGUSR1):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._earlier[signum] = signal.signal(signum, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]  # as signal.signal has returned it

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a run to end. Return its exit code, 128 + N where signal N has ended it."""
        self._process = process
        if self.received is not None:  # before the process was known
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, signum: int, _frame: FrameType | None) -> None:
        if signum in STOPPING and self.received is None:
            self.received = signum
        if self._process is not None:  # SIGINT would end a run without a checkpoint
            self._process.send_signal(signal.SIGTERM if signum in STOPPING else signum)


MAX_TABLE_WIDTH = 1000
"""Most characters of a row of a table that is not printed on a terminal."""

REPORT, HEAT_MAP = "sweep.md", "heat_map.svg"


def plan_given(recipe: Path, changes: Sequence[str], ranks: int | None, folder: Path | None) -> Sweep:
    """Return the sweep that a command line describes; `changes` have the form key=a,b,c. Raises RecipeError for a point
    whose recipe cannot be run. Nothing is written."""
    axes = grid.parse_grid(changes)
    recipes = grid.read_recipes(find_recipe(recipe), axes, ranks)
    return Sweep(folder or Path("sweeps") / next(iter(recipes.values())).name, axes, recipes)


def run_session(given: Sweep, program: Sequence[str] = PROGRAM) -> int:
    """Make the runs of a sweep that have not ended. Return the exit code: 0 where all have, 128 + N after signal N,
    else 1. Raises UsageError where the folder is in use, or has another sweep."""
    with naming_os_errors(f"cannot create the sweep's folder {given.folder}"):
        given.folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock()
    try:
        lock.take(given.folder)
        return _make(*grid.create_or_open(given), program)
    finally:
        lock.release()


def _make(sweep: Sweep, outcomes: Outcomes, program: Sequence[str]) -> int:
    """Make the runs and write the report. Return the exit code."""
    points, folder, console = sweep.grid.points(), sweep.folder, Console(file=sys.stdout, highlight=False)

    def log(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)
        console.file.flush()

    def results() -> list[RunResult]:
        runs = results_of(sweep, outcomes)
        replace_file(folder / grid.SWEEP, to_json(sweep, runs).encode())
        return runs

    def record(point: GridPoint, outcome: RunOutcome) -> None:
        outcomes[point.name], index = outcome, points.index(point)
        if (curve := results()[index].final) is not None:
            line = f"{curve.measure.title} {curve.measure.words(curve.last)}  {format_duration(curve.seconds[-1])}"
        else:
            failed = f": {outcome.error}  ({folder / point.name / OUTPUT})"
            line = outcome.words + (failed if outcome.status is RunStatus.FAILED else "")
        log(f"{index + 1:>{len(str(len(points)))}}/{len(points)}  {point.label}  {line}")

    results()
    done = [point for point in points if sweep.is_done(point, outcomes[point.name])]
    begun = [point for point in points if point not in done and sweep.is_begun(point)]
    log(f"{len(points)} runs into {folder}; each writes its output to NAME/{OUTPUT}")
    if done or begun:
        log(f"{len(done)} have ended before, {len(begun)} are resumed")
    received = run_points(sweep, outcomes, record, program)
    if missing := no_pictures():
        log(missing)
    for table in _write_report(sweep, results(), draws=not missing):
        if not console.is_terminal:  # a file has no width that the table must fit into
            console.width = Measurement.get(console, console.options.update(max_width=MAX_TABLE_WIDTH), table).maximum
        console.print(table)
    log(f"sweep: {folder / REPORT}")
    code = exit_code(outcomes, received)
    if received is not None and code:
        log(f"stopped by {signal.Signals(received).name}; resume with: unisono sweep --resume {folder}")
    return code


def _write_report(sweep: Sweep, results: Sequence[RunResult], draws: bool) -> list[Table]:
    """Write the page, and the pictures if it draws. Return the tables for the screen."""
    measure, charts = shared_measure(results), dict[str, bytes]()
    if draws and (maps := heat_maps(sweep.grid, results)):
        seeds = ", mean over seeds" if SEED in sweep.grid.swept and len(sweep.grid.swept) > 2 else ""
        charts[HEAT_MAP] = draw_heat_maps(maps, f"{sweep.name}: {measure.title} after the last epoch{seeds}")
    curves = [finite_part(result.curve) for result in results if result.curve is not None]
    if draws and (drawn := [curve for curve in curves if curve.epochs]):
        charts[f"{measure.name}.svg"] = draw(drawn, f"{sweep.name}: {measure.title}")
    for name, picture in charts.items():
        replace_file(sweep.folder / name, picture)
    replace_file(sweep.folder / REPORT, to_markdown(sweep, results, list(charts)).encode())
    return [to_rich(table) for table in tables(sweep.grid, results)]


def to_rich(table: ReportTable) -> Table:
    """Return a table for the screen; the best row is bold."""
    shown = Table(title=table.title, title_justify="left")
    for name in table.header[:-1]:
        shown.add_column(name, justify="right", overflow="fold")
    shown.add_column(table.header[-1], overflow="fold")
    for index, row in enumerate(table.rows):
        shown.add_row(*row, style="bold" if index == table.best else None)
    return shown
