"""Runs a program that was written for torchrun as one of the ranks that MPI started.

torchrun                                  unisono run
RANK, WORLD_SIZE, LOCAL_RANK, ...         the same variables, from MPI, before the program begins
env:// served by a TCP store              env:// served by our store: no port on one node
init_process_group("gloo")                a group of ours that answers as the one that was asked for

`docs/how_to/run_torchrun_programs.md` has what `get_backend()` answers then, and why.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from unisono import initialize
from unisono.torch_backend.process_group import ProcessGroup
from unisono.torch_backend.pytorch import GroupBase, PrefixStore, c10d
from unisono.torch_backend.register import NAME, NAME_VARIABLE, Options, register
from unisono.torch_backend.rendezvous import RUN_VARIABLE, address_of_root, variables_of
from unisono.world import World

UNNAMED = "undefined"
"""PyTorch's word for a backend that was not named."""

ANSWERED = {"gloo", "mpi", UNNAMED}
"""Names that a group of ours answers where they were asked for."""


def run_program(world: World, program: str, module: bool, arguments: Sequence[str], backends: Collection[str]) -> None:
    """Run a program, or with `module` a module, as `python PROGRAM ARGUMENTS` would; ours replace groups of `backends`.

    Raises SystemExit at its end.
    """
    os.environ.update(environment_of(world))
    register()
    communication = CommunicationRecord()
    communication.watch_worlds()
    replace_groups(backends, os.environ.get(NAME_VARIABLE) != NAME, communication.record)
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


def environment_of(world: World) -> dict[str, str]:
    """Return the variables that torchrun sets, for this rank. Called by all ranks together."""
    port = 0
    if world.rank == 0:
        with socket.socket() as probe:  # a port that nobody listens on now, for programs that open one of their own
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    port = world.comm.bcast(port, 0)
    place = {"GROUP_RANK": str(world.node), "MASTER_ADDR": address_of_root(world), "MASTER_PORT": str(port)}
    return {**variables_of(world), **place, RUN_VARIABLE: "1"}


def replace_groups(backends: Collection[str], answers: bool, made: Callable[[Any], None]) -> None:
    """Have PyTorch make groups of ours in place of those of `backends`, and where no backend is named.

    With `answers`, they answer the name that was asked for. `made` is called with every group.
    """
    replaced, original = {*backends, UNNAMED}, c10d._new_process_group_helper

    def create(size: int, rank: int, ranks: list[int], backend: str, store: Any, *rest: Any, **named: Any) -> Any:
        asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}  # "gloo", "cpu:gloo,cuda:nccl"
        ours = asked <= replaced and (not ranks or isinstance(dist.group.WORLD, ProcessGroup))  # none: the default one
        if ours and size < 0:  # PyTorch leaves rank and size to its own MPI backend
            joined, rank, size = next(rendezvous("env://", timeout=named["timeout"]))
            store = PrefixStore("default_pg", joined)
        if ours and not isinstance(named.get("backend_options"), Options):
            named["backend_options"] = None  # another backend's
        group, kept = original(size, rank, ranks, NAME if ours else backend, store, *rest, **named)
        if ours and answers and asked <= ANSWERED and isinstance(group, ProcessGroup):
            config = c10d.BackendConfig(backend)
            c10d._world.pg_map[group] = backend, kept
            c10d._world.pg_backend_config[group] = str(config)
            group.stand_in(config.get_device_backend_map())
        made(group)
        return group, kept

    c10d._new_process_group_helper = create
    if "nccl" in replaced:  # PyTorch looks for NCCL's time-out before it calls that function
        warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl backend")


class CommunicationRecord:
    """Record of whether the program's ranks have communicated: if not, each of them has trained a network of its own.

    A program without `init_process_group` makes no process group; Accelerate without `cpu=True`, and a loop without
    DistributedDataParallel, make one and do not use it. All end with exit code 0. So rank 0 says it at the end, by what
    it has done itself.
    """

    def __init__(self) -> None:
        self._groups: list[ProcessGroup] = []
        self._communicated = False  # ranks have communicated, or it is not known whether they have

    def watch_worlds(self) -> None:
        """Record the worlds that the program makes, too: their ranks communicate without a process group."""
        init = initialize.init

        def record(*arguments: Any, **named: Any) -> Any:
            self._communicated = True
            return init(*arguments, **named)

        vars(initialize)["init"] = record

    def record(self, group: Any) -> None:
        """Record a group that the program has made; those of other backends do not tell what they exchange."""
        if isinstance(group, ProcessGroup):
            self._groups.append(group)
        elif isinstance(group, GroupBase):
            self._communicated = True
        if self.any:
            self._communicated, self._groups = True, []

    @property
    def any(self) -> bool:
        """True if ranks have communicated, or it is not known whether they have."""
        return self._communicated or any(group.exchanged for group in self._groups)

    def describe(self, ranks: int) -> str:
        """Return a line for the end of a program on so many ranks: what was missing, and the remedy.

        Empty if they have communicated.
        """
        if ranks == 1 or self.any:
            return ""
        fault, call = (
            ("made a process group, but rank 0 exchanged no tensor in it; wrap the model in", "DistributedDataParallel")
            if self._groups
            else ("made no process group; call", "torch.distributed.init_process_group()")
        )
        libraries = f'Accelerate: Accelerator(cpu=True); Lightning: Trainer(strategy="ddp", devices={ranks})'
        return f"unisono: {ranks} ranks ran alone: the program {fault} {call} ({libraries})"
