"""Runs a program that was written for torchrun as one of the ranks that MPI started.

torchrun                                  unisono run
RANK, WORLD_SIZE, LOCAL_RANK, ...         the same variables, from MPI, before the program begins
env:// served by a TCP store              env:// served by our store: no port on one node
init_process_group("gloo")                init_process_group("unisono"), for the backends that are asked for
"""

from __future__ import annotations

import functools
import os
import runpy
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from unisono.torch_backend.register import NAME, register
from unisono.torch_backend.rendezvous import RUN_VARIABLE, address_of_root, variables_of
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


def serve(backends: Collection[str]) -> None:
    """Have `init_process_group` and `new_group` make our groups where they name no backend, or one of these."""
    import torch.distributed as dist  # noqa: PLC0415 - it takes a second

    register()
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch.distributed")]
    for name, place in (("init_process_group", 0), ("new_group", 2)):
        original = getattr(dist, name)
        replaced = _with_backend(original, place, backends, always=name == "init_process_group")
        for module in modules:
            if vars(module).get(name) is original:
                setattr(module, name, replaced)


def _with_backend(
    function: Callable[..., Any], place: int, backends: Collection[str], always: bool
) -> Callable[..., Any]:
    """Return a function whose argument `backend`, at this place, is ours instead of one of `backends`.

    `always`: also where it is not given. Else the group takes the default group's, and is ours only beside ours.
    """
    import torch.distributed as dist  # noqa: PLC0415

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        given = arguments[place] if len(arguments) > place else named.get("backend")
        asked = {one.rpartition(":")[2] for one in str(given).lower().split(",")}  # "gloo", or "cpu:gloo,cuda:nccl"
        wanted = given is None or asked <= set(backends)
        if wanted and (always or (given is not None and dist.get_backend() == NAME)):
            if len(arguments) > place:
                arguments = (*arguments[:place], NAME, *arguments[place + 1 :])
            else:
                named["backend"] = NAME
        return function(*arguments, **named)

    return call


def run_program(world: World, program: str, module: bool, arguments: Sequence[str], backends: Collection[str]) -> None:
    """Run a program, or with `module` a module, as `python PROGRAM ARGUMENTS` would."""
    os.environ.update(environment_of(world))
    serve(backends)
    sys.argv = [program, *arguments]
    if module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(program).resolve().parent))
        runpy.run_path(program, run_name="__main__")
