"""`unisono sweep`: a run for each point of a grid over keys of a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError
from unisono.launch import ranks_started


def sweep(
    recipe: Annotated[
        Path | None, typer.Argument(help="Recipe: a TOML file, or a name such as digits. Not needed with --resume.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Key and its values: rule.every=1,4,16. May be repeated; a value has no comma."),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Number of ranks of each run; default: that of the recipe.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the sweep; default: sweeps/NAME, with the recipe's name.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a sweep to resume.")] = None,
) -> None:
    """Train each point of a grid over keys of a recipe, one run after another, and compare the runs.

    Each run has a folder of its own in the sweep's folder. A run that fails does not end the sweep; the exit code is
    then 1. The same command again, or --resume, continues a sweep: runs that have ended are skipped, interrupted runs
    are resumed. SIGTERM and Ctrl-C save the current run and end the sweep with exit code 143 and 130.
    """
    from unisono.training.sweep.session import plan_given, run_session

    if ranks_started(os.environ) is not None:
        raise UsageError("unisono sweep starts the ranks of each run itself; start it without mpiexec or srun")
    if resume is None:
        if recipe is None:
            raise UsageError("missing recipe: unisono sweep RECIPE --set KEY=a,b, or --resume FOLDER")
        raise typer.Exit(run_session(plan_given(recipe, changes or [], ranks, folder)))
    if recipe is not None or changes or ranks is not None or folder is not None:
        raise UsageError(f"--resume {resume} takes recipe, grid and ranks from that folder; omit all other arguments")
    raise typer.Exit(run_session(resume))
