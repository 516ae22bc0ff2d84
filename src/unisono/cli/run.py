"""`unisono run`: runs a program written for torchrun on ranks of MPI."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.cli.train import launch
from unisono.errors import LaunchError, UsageError
from unisono.launch import cores, ranks_started
from unisono.torch_backend.register import NAME, NAME_VARIABLE


def run(
    program: Annotated[str, typer.Argument(help="Program; with -m, a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the program.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Number of ranks to start on this machine; default: one per core, at least 2."),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run PROGRAM as a module.")] = False,
    backend_for: Annotated[
        str, typer.Option(help="Backends that the unisono backend replaces, separated by commas.")
    ] = "gloo,mpi",
) -> None:
    """Run a program written for torchrun, unmodified. Inside mpiexec or srun, this process is one of its ranks.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. init_process_group uses the
    unisono backend if the program names none, or one of --backend-for. get_backend() then answers gloo or mpi if the
    program has named it; with UNISONO_BACKEND_NAME=unisono it answers unisono.
    """
    if not module and not Path(program).is_file():
        raise UsageError(f"there is no program {program}; run a module with: unisono run -m {program}")
    if ranks is not None and ranks < 1:
        raise LaunchError(f"--ranks {ranks}: the number of ranks must be at least 1")
    if (name := os.environ.get(NAME_VARIABLE)) not in (None, "", NAME):
        raise UsageError(f"{NAME_VARIABLE}={name}: it is {NAME}, or not set")
    started = ranks_started(os.environ)
    if started is None:
        options = [f"--backend-for={backend_for}", *(["-m"] if module else [])]
        raise typer.Exit(launch(ranks or max(2, cores()), ["run", *options, program, *(arguments or [])]))
    if ranks is not None and ranks != started:
        raise LaunchError(f"--ranks {ranks}, but the launcher has started {started}; omit --ranks")
    _run_as_rank(
        program, module, arguments or [], {name.strip().lower() for name in backend_for.split(",") if name.strip()}
    )


def _run_as_rank(program: str, module: bool, arguments: list[str], backends: set[str]) -> None:
    from unisono.torch_backend.mpi_job import mpi_job
    from unisono.torch_backend.program import run_program

    world = mpi_job().world
    try:
        run_program(world, program, module, arguments, backends)
    except Exception:  # noqa: BLE001 - the program's, whatever it is: a traceback, and the end of all ranks
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
