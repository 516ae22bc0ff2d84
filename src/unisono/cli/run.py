"""`unisono run`: a program that was written for torchrun, on ranks of MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.train import launch
from unisono.errors import LaunchError, UsageError
from unisono.launch import cores, ranks_started


def run(
    program: Annotated[str, typer.Argument(help="The program; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine, if no launcher did; else one for each core, 2 at least."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is a module.")] = False,
    backend_for: Annotated[
        str, typer.Option(help="Backends that the unisono backend stands in for, with commas between.")
    ] = "gloo,mpi",
) -> None:
    """Run a program that was written for torchrun, unmodified; inside mpiexec or srun, as one of their ranks.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. init_process_group uses the
    unisono backend if the program names none, or one of --backend-for.
    """
    if not module and not Path(program).is_file():
        raise UsageError(f"there is no program {program}; a module is run by unisono run -m {program}")
    if ranks is not None and ranks < 1:
        raise LaunchError(f"--ranks {ranks}: a program has at least 1 rank")
    started = ranks_started(os.environ)
    if started is None:
        options = [f"--backend-for={backend_for}", *(["-m"] if module else [])]
        raise typer.Exit(launch(ranks or max(2, cores()), ["run", *options, program, *(arguments or [])]))
    if ranks is not None and ranks != started:
        raise LaunchError(f"--ranks {ranks}, but the launcher has started {started}; leave --ranks away")
    _be_a_rank(
        program, module, arguments or [], {name.strip().lower() for name in backend_for.split(",") if name.strip()}
    )


def _be_a_rank(program: str, module: bool, arguments: list[str], backends: set[str]) -> None:
    from unisono.torch_backend.job import job
    from unisono.torch_backend.program import play

    world = job().world
    try:
        play(world, program, module, arguments, backends)
    except Exception:  # noqa: BLE001 - the program's, whatever it is: a traceback, and the end of all ranks
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
