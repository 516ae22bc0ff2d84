"""Runs a program that was written for torchrun as one of the ranks that MPI started.

torchrun                                  unisono run
RANK, WORLD_SIZE, LOCAL_RANK, ...         the same variables, from MPI, before the program begins
env:// served by a TCP store              env:// served by our store: no port on one node
init_process_group("gloo")                a group of ours that answers "gloo" (`stand_in.py`)
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from unisono.torch_backend.isolation import CommunicationRecord
from unisono.torch_backend.register import NAME, NAME_VARIABLE, register
from unisono.torch_backend.rendezvous import RUN_VARIABLE, address_of_root, variables_of
from unisono.torch_backend.stand_in import StandIns
from unisono.world import World


def environment_of(world: World) -> dict[str, str]:
    """Return the variables that torchrun sets, for this rank. Called by all ranks together."""
    port = world.comm.bcast(_free_port() if world.rank == 0 else 0, 0)
    return {
        **variables_of(world),
        "GROUP_RANK": str(world.node),
        "MASTER_ADDR": address_of_root(world),
        "MASTER_PORT": str(port),
        RUN_VARIABLE: "1",
    }


def _free_port() -> int:
    """Return a port that nobody listens on now, for programs that open one of their own."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def run_program(world: World, program: str, module: bool, arguments: Sequence[str], backends: Collection[str]) -> None:
    """Run a program, or with `module` a module, as `python PROGRAM ARGUMENTS` would; ours replace groups of `backends`.

    Raises SystemExit at its end.
    """
    os.environ.update(environment_of(world))
    register()
    communication = CommunicationRecord()
    communication.watch_worlds()
    StandIns(backends, os.environ.get(NAME_VARIABLE) != NAME, communication.record).install()
    sys.argv = [program, *arguments]
    ended = SystemExit(0)
    try:
        if module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).resolve().parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as exit_of_program:
        ended = exit_of_program
    if world.rank == 0 and not ended.code and (line := communication.describe(world.size)):
        print(line, file=sys.stderr, flush=True)
    raise ended
