"""Times Unisono's collectives, or gloo's, on ranks of this Python environment, as `peer_program` times its library's.

mpiexec -n 2 python -m unisono.bench.own_program ours|gloo OUTPUT SETTINGS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono.bench.collectives import gloo_group
from unisono.bench.peer_program import (
    BARRIER,
    COPY,
    GLOO,
    ORDINARY,
    WINDOWS,
    Calls,
    TimedLibrary,
    measure,
    write_results,
)
from unisono.initialize import init
from unisono.mpi import MPI
from unisono.world import World


def own_contenders(world: World) -> dict[str, TimedLibrary]:
    """Return Unisono's collectives by memory."""

    def calls(payload: torch.Tensor, result: torch.Tensor) -> Calls:
        return {
            "allreduce": lambda: world.allreduce(payload),
            "reduce_scatter": lambda: world.reduce_scatter(payload),
            "all_gather": lambda: world.all_gather(payload, result),
            "broadcast": lambda: world.broadcast(payload),
            "all_to_all": lambda: world.all_to_all(payload),
            "reduce": lambda: world.reduce(payload),
            BARRIER: world.barrier,
        }

    windows = partial(world.empty, dtype=torch.float32)
    return {
        ORDINARY: TimedLibrary(torch.zeros, calls, world.barrier),
        WINDOWS: TimedLibrary(windows, calls, world.barrier),
    }


def gloo_calls(payload: torch.Tensor, result: torch.Tensor) -> Calls:
    """Return the calls of torch.distributed."""
    return {
        "allreduce": lambda: dist.all_reduce(payload),
        "reduce_scatter": lambda: dist.reduce_scatter_single(result, payload),
        "all_gather": lambda: dist.all_gather_single(result, payload),
        "broadcast": lambda: dist.broadcast(payload, 0),
        "all_to_all": lambda: dist.all_to_all_single(result, payload),
        "reduce": lambda: dist.reduce(payload, 0),
        BARRIER: dist.barrier,
    }


def library_of_copies(rank: int, barrier: Callable[[], None]) -> TimedLibrary:
    """Return copies by rank 0; the other ranks do nothing."""

    def calls(payload: Any, result: Any) -> Calls:
        return {COPY: (lambda: payload) if rank else (lambda: np.copyto(result.numpy(), payload.numpy()))}

    # Not NumPy: of its arrays below 512 KiB, the second lies 16 bytes behind a page of the first, and copies take long.
    return TimedLibrary(torch.zeros, calls, barrier)


def main() -> None:
    """Time one of the two, and in ours the copy as well."""
    world, (name, path, text) = init(), sys.argv[1:]
    settings = json.loads(text)
    if name == GLOO:
        with gloo_group(world):
            rows = measure(world.comm, {GLOO: TimedLibrary(torch.zeros, gloo_calls, world.barrier)}, **settings)
        library = f"torch {torch.__version__}"
    else:
        rows = measure(world.comm, own_contenders(world), **settings)
        rows += measure(
            world.comm, {COPY: library_of_copies(world.rank, world.barrier)}, **{**settings, "collectives": [COPY]}
        )
        library = MPI.Get_library_version()
    write_results(world.comm, path, library, rows)


if __name__ == "__main__":
    main()
