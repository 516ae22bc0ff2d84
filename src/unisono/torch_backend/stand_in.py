"""Our process groups in place of those that a program asks for by the name of another backend.

asked for                          made by    get_backend() answers
"gloo", "mpi", "cpu:gloo"          unisono    the same: programs and libraries choose their branch by it
no backend                         unisono    "undefined", as PyTorch does
"nccl", with --backend-for         unisono    "unisono": the branch of NCCL needs a GPU
"unisono"                          unisono    "unisono"

With UNISONO_BACKEND_NAME=unisono, all of them answer "unisono".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from unisono.torch_backend.options import Options
from unisono.torch_backend.process_group import ProcessGroup
from unisono.torch_backend.pytorch import PrefixStore, c10d
from unisono.torch_backend.register import NAME

UNNAMED = "undefined"
"""PyTorch's word for a backend that was not named."""

ANSWERED = {"gloo", "mpi", UNNAMED}
"""Names that a group of ours answers where they were asked for."""


class StandIns:
    """Maker of process groups: ours in place of those of `backends`, and where no backend is named.

    With `answers`, they answer the name that was asked for. `made` is called with every group.
    """

    def __init__(self, backends: Collection[str], answers: bool, made: Callable[[Any], None]) -> None:
        self._backends, self._answers, self._made = {*backends, UNNAMED}, answers, made
        self._original: Callable[..., tuple[Any, Any]] = c10d._new_process_group_helper

    def install(self) -> None:
        """Replace the function by which PyTorch makes every process group."""
        c10d._new_process_group_helper = self.create
        if "nccl" in self._backends:  # PyTorch looks for NCCL's time-out before it calls that function
            warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl backend")

    def create(self, size: int, rank: int, ranks: list[int], backend: str, store: Any, *rest: Any, **named: Any) -> Any:
        """Return a group and its store, as PyTorch's function does; `ranks` is empty for the default group."""
        asked = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}  # "gloo", "cpu:gloo,cuda:nccl"
        if asked <= self._backends and (not ranks or isinstance(dist.group.WORLD, ProcessGroup)):
            if size < 0:  # PyTorch leaves rank and size to its own MPI backend
                joined, rank, size = next(rendezvous("env://", timeout=named["timeout"]))
                store = PrefixStore("default_pg", joined)
            if not isinstance(named.get("backend_options"), Options):
                named["backend_options"] = None  # another backend's
            group, kept = self._original(size, rank, ranks, NAME, store, *rest, **named)
            if self._answers and asked <= ANSWERED and isinstance(group, ProcessGroup):
                _answer(group, kept, backend)
        else:
            group, kept = self._original(size, rank, ranks, backend, store, *rest, **named)
        self._made(group)
        return group, kept


def _answer(group: ProcessGroup, store: Any, backend: str) -> None:
    """Have PyTorch and the group answer as a group of `backend` would."""
    config = c10d.BackendConfig(backend)
    c10d._world.pg_map[group] = backend, store
    c10d._world.pg_backend_config[group] = str(config)
    group.stand_in(config.get_device_backend_map())
