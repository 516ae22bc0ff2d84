"""Times the allreduce of every algorithm, the MPI library, gloo and the bound, at every size, on a world's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono.addresses import address_towards, interface_of
from unisono.bench.peer_program import COPY, GLOO, SIZES
from unisono.measure.timing import times, timing_of
from unisono.mpi import MPI
from unisono.network import NetworkError, simulate
from unisono.network.pace import pace_of
from unisono.schedules import candidates, find
from unisono.torch_backend.rendezvous import store_of
from unisono.world import World

MIN_TRIALS, MAX_TRIALS = 3, 31
"""Smallest and largest number of trials of each contender."""

TRIAL_SECONDS = 8.0
"""Seconds of trials for a size, in addition to the MIN_TRIALS of each contender."""

AUTO, LIBRARY = "auto", "MPI library"
"""Contenders in addition to the algorithms, GLOO and COPY."""

ON_TENSOR = "MPI library, tensor"
"""The library on a tensor's memory, as programs with tensors call it; LIBRARY uses an array made beforehand."""

MAX_ON_TENSOR_BYTES = 64 << 10
"""Largest payload in bytes for which ON_TENSOR is timed too: there a tensor's overhead matters."""

WIRES = ("bfloat16", "float16")


def measure(
    world: World,
    sizes: Sequence[int] = SIZES,
    algorithms: Sequence[str] | None = None,
    rate: float | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Time the allreduce of float32 tensors, in place, all ranks together. Return the results as data for JSON.

    `sizes` are in bytes. `algorithms` are the ones to time; None for all that are worth it. `rate` is the speed of a
    node's link in bits per second, if known; otherwise the bound uses the table's measured speed. `log` gets a line for
    each size.
    """
    chosen = list(algorithms) if algorithms is not None else _algorithms(world)
    found: dict[str, Any] = {
        "ranks": world.size,
        "nodes": world.nodes,
        "supernodes": len(set(world.placement.supernodes)) or 1,
        "library": MPI.Get_library_version().splitlines()[0].strip(),
        "sizes": [],
    }
    with gloo_group(world):
        for nbytes in sizes:
            calls = contenders(world, nbytes, chosen)
            seconds = times(world, calls, MIN_TRIALS, MAX_TRIALS, TRIAL_SECONDS)
            row: dict[str, Any] = {"bytes": nbytes, "bound_us": None, "contenders": {}}
            if world.nodes > 1:
                beta = 8 / rate if rate else float(world.table.network.beta)
                row["bound_us"] = 2 * (world.nodes - 1) / world.nodes * nbytes * beta * 1e6
                row["auto"] = world.table.choose("allreduce", world.placement, nbytes).algorithm
            for name, took in seconds.items():
                timing = timing_of(took)
                row["contenders"][name] = {
                    "median_us": timing.median * 1e6,
                    "low_us": timing.low * 1e6,
                    "high_us": timing.high * 1e6,
                    "simulated_us": _simulated(world, name, nbytes),
                }
            found["sizes"].append(row)
            best = min(row["contenders"].keys() - {COPY}, key=lambda name: float(row["contenders"][name]["median_us"]))
            log(f"{nbytes} B: fastest is {best}, {row['contenders'][best]['median_us'] / 1e3:.3f} ms")
    return found


def contenders(world: World, nbytes: int, algorithms: Sequence[str]) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by name: each sums zeros over all ranks, in place."""
    count = nbytes // 4
    here, gloo, library = torch.zeros(count), torch.zeros(count), np.zeros(count, np.float32)
    calls: dict[str, Callable[[], object]] = {
        AUTO: lambda: world.allreduce(here),
        LIBRARY: lambda: world.comm.Allreduce(MPI.IN_PLACE, library),
        GLOO: lambda: dist.all_reduce(gloo),
    }
    if nbytes <= MAX_ON_TENSOR_BYTES:
        calls[ON_TENSOR] = lambda: world.comm.Allreduce(MPI.IN_PLACE, gloo.numpy())
    if world.nodes == 1:
        source = np.zeros(count, np.float32)
        calls[COPY] = lambda: np.copyto(library, source)
    for name in algorithms:
        base, _, wire = name.partition(" ")
        calls[name] = partial(world.allreduce, here, base, wire or None)
    return calls


def _algorithms(world: World) -> list[str]:
    if world.nodes == 1:
        return ["flat", "direct", "halving", "ring"]
    return [*candidates("allreduce", world.placement), *(f"{AUTO} {wire}" for wire in WIRES)]


def _simulated(world: World, name: str, nbytes: int) -> float | None:
    """Return the predicted time of a schedule by messages, in microseconds; None where there is no prediction."""
    if world.nodes == 1 or " " in name or name in (AUTO, LIBRARY, ON_TENSOR, GLOO):
        return None
    try:
        algorithm = find(name, world.placement).allreduce
        pace = pace_of(algorithm(world.rank, world.size), world.size, -(-nbytes // 4), 4, world.table.network)
        seconds = simulate(
            algorithm, world.placement, world.table.network, nbytes, 4 * pace.chunk_length, pace.in_flight
        ).seconds
    except NetworkError:
        return None
    return float(seconds) * 1e6


@contextmanager
def gloo_group(world: World) -> Iterator[None]:
    """Start gloo between the same ranks, over the interface by which other nodes reach rank 0; stop it at the end."""
    store, address = store_of(world)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(address)))
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
        world.comm.Barrier()
    finally:
        dist.destroy_process_group()
