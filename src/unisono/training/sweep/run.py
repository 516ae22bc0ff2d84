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
from types import FrameType, TracebackType
from typing import Self

from unisono.errors import UsageError
from unisono.training.sweep.directory import OUTPUT, RunOutcome, RunStatus, Sweep
from unisono.training.sweep.grid import GridPoint

PROGRAM = (sys.executable, "-m", "unisono")

STOPPED = (130, 143)
"""Exit codes of `unisono train` after SIGINT and SIGTERM."""

ERROR_LINES = (re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b"), re.compile(r"unisono: "))
"""Beginnings of error lines, the most telling first: the end of a traceback, a message of Unisono."""

RANK = re.compile(r"^\s*rank \d+ of \d+: ")
"""Beginning of the lines of one rank."""

Record = Callable[[GridPoint, RunOutcome], None]


def run_points(
    sweep: Sweep, outcomes: Mapping[str, RunOutcome], record: Record, program: Sequence[str] = PROGRAM
) -> int | None:
    """Make the runs that have not ended. Return the signal that stopped the sweep; None where none did.

    `record` is called with the outcome of each run as it ends. `program` is the command that has `train`.
    """
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


def train_arguments(sweep: Sweep, point: GridPoint) -> list[str]:
    """Return the arguments that start a point's run, or resume it."""
    folder = sweep.folder / point.name
    if sweep.is_begun(point):
        return ["train", f"--resume={folder}"]
    return ["train", str(sweep.recipe_file(point)), f"--run={folder}"]


def _run(sweep: Sweep, point: GridPoint, program: Sequence[str], signals: StopSignals) -> RunOutcome:
    """Make a run, with its output appended to its file. Raises UsageError where that file cannot be written."""
    path, arguments = sweep.folder / point.name / OUTPUT, train_arguments(sweep, point)
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as output:
            output.write(f"$ unisono {' '.join(arguments)}\n".encode())
            output.flush()
            begin = output.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must not end the run before it is saved
            )
        code = signals.wait(process)
        return outcome_of(code, _read(path, begin))
    except OSError as error:
        raise UsageError(
            f"cannot run {point.name}: {path}: {error.strerror}; repair that, then resume with --resume {sweep.folder}"
        ) from error


def _read(path: Path, begin: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def outcome_of(code: int, output: str) -> RunOutcome:
    """Return the outcome of a run that ended with an exit code."""
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
        if found := [line for line in lines if pattern.match(line)]:
            return found[-1]
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
        for number in (*STOPPING, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._earlier[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal has returned it

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a run to end. Return its exit code, 128 + N where signal N has ended it."""
        self._process = process
        if self.received is not None:  # before the process was known
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        self._process = None
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in STOPPING and self.received is None:
            self.received = number
        if self._process is not None:  # SIGINT would end a run without a checkpoint
            self._process.send_signal(signal.SIGTERM if number in STOPPING else number)
