"""`unisono run`: runs a program written for torchrun on ranks of MPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from unisono.cli.elastic import ElasticOption, HostsOption, MinRanksOption, check_elastic, run_elastically
from unisono.cli.ranks import count_ranks, launch
from unisono.errors import UsageError
from unisono.launch import SURVIVORS_VARIABLE, cores, ranks_started
from unisono.torch_backend.register import NAME, NAME_VARIABLE
from unisono.training import run_directory
from unisono.training.checkpoint.layout import checkpoint_names

SEVERAL_NODES = (
    "unisono run starts the ranks of this machine; start those of several once, together: "
    "mpiexec -n 8 -ppn 4 -hosts a,b unisono run PROGRAM, or srun unisono run PROGRAM"
)

REFUSED = {
    "nnodes": (("1", "1:1"), SEVERAL_NODES),
    "node-rank": (("0",), SEVERAL_NODES),
    "max-restarts": (("0",), "a program with a loop of unisono.elastic goes on with --elastic; others begin anew"),
}
"""Options of torchrun by their names: the values that are accepted, and the remedy for others."""


def both_spellings(*names: str) -> tuple[str, ...]:
    """Return options with hyphens and with underscores, as torchrun accepts them.

    >>> both_spellings("node-rank", "standalone")
    ('--node-rank', '--node_rank', '--standalone')
    """
    return tuple(f"--{name}" for given in names for name in dict.fromkeys((given, given.replace("-", "_"))))


def run(
    program: Annotated[str, Argument(help="Program; with -m, a module.")],
    arguments: Annotated[list[str] | None, Argument(help="Arguments of the program.")] = None,
    ranks: Annotated[
        int | None,
        Option(
            "--ranks",
            "-n",
            *both_spellings("nproc-per-node"),
            help="Number of ranks to start on this machine; default: one per core, at least 2.",
        ),
    ] = None,
    module: Annotated[bool, Option("-m", "--module", help="Run PROGRAM as a module.")] = False,
    backend_for: Annotated[
        str, Option(help="Backends that the unisono backend replaces, separated by commas.")
    ] = "gloo,mpi",
    elastic: ElasticOption = False,
    min_ranks: MinRanksOption = 1,
    hosts: HostsOption = "",
    resume: Annotated[Path | None, Option(help="Folder of an elastic run that goes on.")] = None,
    nnodes: Annotated[str, Option("--nnodes", hidden=True)] = "1",
    node_rank: Annotated[str, Option(*both_spellings("node-rank"), hidden=True)] = "0",
    max_restarts: Annotated[str, Option(*both_spellings("max-restarts"), hidden=True)] = "0",
    _standalone: Annotated[bool, Option("--standalone", hidden=True)] = False,
    _rendezvous: Annotated[
        list[str] | None,
        Option(
            *both_spellings("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "master-addr", "master-port"),
            hidden=True,
        ),
    ] = None,
) -> None:
    """Run a program written for torchrun, unmodified. Inside mpiexec or srun, this process is one of its ranks.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. init_process_group uses the
    unisono backend if the program names none, or one of --backend-for. get_backend() then answers gloo or mpi if the
    program has named it; with UNISONO_BACKEND_NAME=unisono it answers unisono. torchrun's options for one machine are
    accepted.
    """
    check_elastic(elastic, min_ranks, hosts)
    torchrun = {"nnodes": nnodes, "node-rank": node_rank, "max-restarts": max_restarts}
    _check(program, module, elastic, resume, torchrun)
    count = count_ranks(ranks, max(2, cores()))
    if elastic:
        home = resume or run_directory.new_folder(Path(program).stem)
        command = ["run", *["-m"] * module, f"--backend-for={backend_for}", program, *(arguments or [])]
        raise Exit(run_elastically(home, command, command, count, min_ranks, hosts))
    if ranks_started(os.environ) is None:
        if ranks is not None and ranks > cores():
            print(f"unisono: {ranks} ranks take turns on {cores()} cores; fewer would be faster", file=sys.stderr)
        raise Exit(launch(count))
    from unisono.torch_backend.mpi_job import mpi_job
    from unisono.torch_backend.program import run_program
    from unisono.uncaught import frames_of_program

    backends = {name.strip().lower() for name in backend_for.split(",") if name.strip()}
    world = mpi_job().world
    try:
        run_program(world, program, module, arguments or [], backends)
    except Exception as error:  # the program's, whatever it is: a traceback, and the end of all ranks
        if SURVIVORS_VARIABLE in os.environ:
            raise  # perhaps the death of another, after which this process goes on
        trace = frames_of_program(error, error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def _check(program: str, module: bool, elastic: bool, resume: Path | None, torchrun: Mapping[str, str]) -> None:
    """Raise UsageError for values of torchrun's options, a program, or what it resumes that do not fit."""
    for name, value in torchrun.items():
        accepted, remedy = REFUSED[name]
        if value not in accepted:
            raise UsageError(f"--{name} {value}: {remedy}")
    if not module and not Path(program).is_file():
        remedy = "" if program.endswith(".py") or "/" in program else f"; run a module with: unisono run -m {program}"
        raise UsageError(f"there is no program {Path(program).absolute()}{remedy}")
    if (answer := os.environ.get(NAME_VARIABLE)) not in (None, "", NAME):
        raise UsageError(f"{NAME_VARIABLE}={answer}: it is {NAME}, or not set")
    if resume is not None and not (elastic and checkpoint_names(resume / run_directory.CHECKPOINTS)):
        raise UsageError(f"--resume {resume}: there is no checkpoint in it" if elastic else "--resume needs --elastic")
    package = program.partition(".")[0]  # looked for, but not imported
    if module and not (package and (PathFinder.find_spec(package, [str(Path.cwd())]) or find_spec(package))):
        raise UsageError(f"there is no module {program}, neither in {Path.cwd()} nor installed")
