"""`unisono train`: starts the ranks, or is one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from unisono.errors import LaunchError, UsageError
from unisono.launch import find_mpiexec, keep_memory, launch_command, launch_environment, ranks_started
from unisono.training import run_directory
from unisono.training.recipe import Recipe, check_run, differences, read_recipe


def train(
    recipe: Annotated[Path | None, typer.Argument(help="The recipe, a TOML file. Not needed with --resume.")] = None,
    ranks: Annotated[int | None, typer.Option(help="How many ranks to start; else the recipe says.")] = None,
    changes: Annotated[list[str] | None, typer.Option("--set", help="Change the recipe: training.epochs=3")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    run: Annotated[Path | None, typer.Option(help="The folder of the new run; else one under runs/.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what each thread of each rank did, when: a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Train what a recipe describes, under mpiexec; inside mpiexec or srun, as one of their ranks."""
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
        raise typer.Exit(launch(count, ["train", *([str(recipe)] if recipe else []), *options]))
    if started is None:
        keep_memory()
        _say(notes)
    _be_a_rank(wanted, run, resume, timeline)


def _recipe(path: Path | None, changes: list[str], resume: Path | None, run: Path | None) -> tuple[Recipe, list[str]]:
    """What to run, and what to say about it. A run that is resumed keeps its own recipe."""
    if resume is None:
        if path is None:
            raise UsageError("which recipe? unisono train RECIPE.toml, or --resume RUN")
        return read_recipe(path, changes), []
    if run is not None:
        raise UsageError("--run names the folder of a new run; a resumed one stays in its own")
    wanted = run_directory.recipe_of(resume, changes)
    notes = []
    if path is not None and (keys := differences(read_recipe(path, changes), wanted)):
        notes.append(f"the run's own recipe is used; {path} differs from it in {', '.join(keys)}")
    return wanted, notes


def _say(notes: list[str]) -> None:
    for note in notes:
        print(note, flush=True)


def launch(ranks: int, arguments: list[str]) -> int:
    """Run this command on `ranks` ranks; the exit code of the launcher, or 143 after SIGTERM, which ends it too."""
    command = launch_command(find_mpiexec(), ranks, arguments)
    environment = launch_environment(os.environ, sys.stdout.isatty())
    received: list[int] = []
    with subprocess.Popen(command, env=environment) as process:

        def pass_on(number: int, _frame: FrameType | None) -> None:
            received.append(number)
            process.send_signal(number)

        signal.signal(signal.SIGTERM, pass_on)
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the launcher got it too, and ends the ranks
                continue
            if received:
                return 128 + received[0]
            return code if code >= 0 else 128 - code


def _be_a_rank(recipe: Recipe, run: Path | None, resume: Path | None, timeline: Path | None) -> None:
    from unisono.training.run import train as carry_out
    from unisono.world import init

    world = init()
    try:
        with world.agreeing():
            carry_out(recipe, world, run, resume, timeline)
    except KeyboardInterrupt:  # this rank got it; the others may not have, and would wait
        world.abort(130)
