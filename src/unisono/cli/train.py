"""`unisono train`: starts the ranks, or runs as one of them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from unisono.errors import LaunchError, UsageError
from unisono.launch import find_mpiexec, keep_memory, launch_command, launch_environment, ranks_started
from unisono.startup import Startup
from unisono.timeouts import timeout_of
from unisono.training import run_directory
from unisono.training.named import find_recipe
from unisono.training.recipe import Recipe, check_run, differences, read_recipe
from unisono.witness import LISTENER, Listener

ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a run to end."""

PATIENCE = 3.0
"""Seconds that mpiexec has to end after a terminal's Ctrl-C."""


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe: a TOML file, or a name such as digits. Not needed with --resume.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="How many ranks to start; else the recipe says.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: training.epochs=3")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    run: Annotated[Path | None, typer.Option(help="The folder of the new run; else one under runs/.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what each thread of each rank did, when: a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Train as a recipe describes, under mpiexec; inside mpiexec or srun, run as one of their ranks.

    SIGUSR1, to this command or to any rank, saves a checkpoint at the end of the step. SIGTERM saves one and ends the
    run with exit code 143; --resume continues it. A second SIGTERM ends the run at once.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before the first step there is nothing to save
    changes = changes or []
    wanted, notes = _recipe(recipe, changes, resume, run)
    started = ranks_started(os.environ)
    if ranks is not None and ranks < 1:
        raise LaunchError(f"--ranks {ranks}: a run has at least 1 rank")
    if started is not None and ranks is not None and started != ranks:
        raise LaunchError(f"--ranks {ranks}, but the launcher has started {started}; leave --ranks away")
    count = started or ranks or wanted.ranks
    check_run(wanted, count)
    if started is None and count > 1:
        options = [f"--set={change}" for change in changes]
        options += [f"--resume={resume}"] if resume else []
        options += [f"--run={run}"] if run else []
        options += [f"--timeline={timeline}"] if timeline else []
        _say(notes)
        arguments = ["train", *([str(recipe)] if recipe else []), *options]
        raise typer.Exit(launch(count, arguments, wanted.training.timeout or None))
    if started is None:
        keep_memory()
        _say(notes)
    _be_a_rank(wanted, run, resume, timeline)


def _recipe(path: Path | None, changes: list[str], resume: Path | None, run: Path | None) -> tuple[Recipe, list[str]]:
    """Return the recipe to run, and lines to report. A resumed run keeps its own recipe."""
    if resume is None:
        if path is None:
            raise UsageError("which recipe? unisono train RECIPE.toml, or --resume RUN")
        return read_recipe(find_recipe(path), changes), []
    if run is not None:
        raise UsageError("--run names the folder of a new run; a resumed one stays in its own")
    wanted = run_directory.recipe_of(resume, changes)
    notes = []
    if path is not None and (keys := differences(read_recipe(find_recipe(path), changes), wanted)):
        notes.append(f"the run's own recipe is used; {path} differs from it in {', '.join(keys)}")
    return wanted, notes


def _say(notes: list[str]) -> None:
    for note in notes:
        print(note, flush=True)


def launch(ranks: int, arguments: list[str], timeout: float | None = None) -> int:
    """Run this command on `ranks` ranks. Return the exit code. Signals sent to this process alone are passed on.

    `timeout`, in seconds as `timeouts.py` defines it, limits the wait for a rank that is stopped during the start.
    """
    command, limit = launch_command(find_mpiexec(), ranks, arguments), timeout_of(timeout)
    environment = launch_environment(os.environ, sys.stdout.isatty())
    received: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for process in started:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGUSR1, pass_on)
    with (
        closing(Listener()) as listener,
        subprocess.Popen(command, env={**environment, LISTENER: listener.address}) as process,
    ):
        started.append(process)
        for early in received:
            process.send_signal(early)
        startup = Startup(process.pid, ranks, limit)
        code = _wait(process, received, startup)
        code = startup.finish(any(number in ENDING for number in received), code, listener)
    return exit_code(code, received)


def _wait(process: subprocess.Popen[bytes], received: list[int], startup: Startup) -> int:
    """Wait for mpiexec to end. It gets a terminal's Ctrl-C as well; a SIGINT sent only to this process is passed on."""
    until = math.inf
    while True:
        try:
            if not startup.goes_on:
                return process.wait(None if until == math.inf else max(0.0, until - time.monotonic()))
            startup.look()
            if (code := process.poll()) is not None:
                return code
        except KeyboardInterrupt:
            received.append(signal.SIGINT)
            until = time.monotonic() + PATIENCE
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() >= until:
            process.send_signal(signal.SIGINT)
            until = math.inf


def exit_code(code: int, received: Sequence[int]) -> int:
    """Return the exit code, given mpiexec's `code` and the signals that this process received.

    0 and 2 come from the ranks: they had finished before, or something failed, such as a checkpoint. Otherwise the code
    is that of the signal that ended them, however mpiexec reports it.
    """
    ending = [number for number in received if number in ENDING]
    if ending and code not in (0, 2):
        return 128 + ending[0]
    return code if code >= 0 else 128 - code


def _be_a_rank(recipe: Recipe, run: Path | None, resume: Path | None, timeline: Path | None) -> None:
    from unisono.training.run import train as carry_out
    from unisono.world import init

    world = init(timeout=recipe.training.timeout or None)
    with world.agree_on_errors():
        code = carry_out(recipe, world, run, resume, timeline)
    world.barrier()  # a rank that is stopped here is still waited for, and named; a launcher ends the others after it
    if code:
        raise typer.Exit(code)
