"""One rank of the benchmark: times every contender at every size, interleaved, and prints rank 0's JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

import unisono

SIZES = (
    4,
    64,
    1 << 10,
    4 << 10,
    16 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    32 << 20,
    100 * 1000 * 1000,
)


NEW_BYTES = 4 << 10
"""Largest size at which new tensors are summed, too, as a loop's losses are: each once, so they are made before."""


def contenders(world: unisono.World, nbytes: int, most_calls: int) -> dict[str, Callable[[], object]]:
    """Each contender sums float32 zeros in place, over all ranks; `copy` is the bound. None is called more often."""
    count = nbytes // 4
    window = world.empty(count, torch.float32)
    anywhere, gloo = torch.zeros(count), torch.zeros(count)
    library = np.zeros(count, np.float32)
    source, target = np.zeros(count, np.float32), np.ones(count, np.float32)
    entries: dict[str, Callable[[], object]] = {
        "window": lambda: world.allreduce(window),
        "anywhere": lambda: world.allreduce(anywhere),
        "library": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, library),
        "library, tensor": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, anywhere.numpy()),
        "gloo": lambda: dist.all_reduce(gloo),
        "copy": lambda: np.copyto(target, source),
    }
    if nbytes > NEW_BYTES:
        return entries
    new, new_library = (iter([torch.zeros(count) for _ in range(most_calls)]) for _ in range(2))
    return entries | {
        "new tensors": lambda: world.allreduce(next(new)),
        "library, new tensors": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, next(new_library).numpy()),
    }


def time_once(world: unisono.World, call: Callable[[], object], calls: int) -> tuple[float, float]:
    """When this rank began its calls and when it ended them: seconds of the clock that all ranks of a machine share."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return start, time.perf_counter()


def measure(world: unisono.World, nbytes: int) -> dict[str, dict[str, float]]:
    """Median and quartiles, in microseconds a call, from the first rank's begin to the last rank's end."""
    calls = max(1, min(200, (20 << 20) // nbytes)) if world.size <= 2 else max(1, min(20, (4 << 20) // nbytes))
    repetitions = 15 if nbytes >= 16 << 20 else 41
    entries = contenders(world, nbytes, calls * repetitions + 2)
    for call in entries.values():
        time_once(world, call, 2)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in entries}
    names = list(entries)
    for repetition in range(repetitions):
        for turn in range(len(names)):  # each comes first as often as the others
            name = names[(repetition + turn) % len(names)]
            times[name].append(time_once(world, entries[name], calls))
    results = {}
    for name, times_of_rank in times.items():
        spans = [
            (max(end for _, end in ranks) - min(start for start, _ in ranks)) / calls * 1e6
            for ranks in zip(*world.all_gather_object(times_of_rank), strict=True)
        ]
        lower, median, upper = statistics.quantiles(spans, n=4)
        results[name] = {"median_us": median, "lower_us": lower, "upper_us": upper}
    return results


def main(store: str) -> None:
    """Measure all sizes; rank 0 prints the JSON."""
    world = unisono.init()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world.size), rank=world.rank, world_size=world.size)
    library = MPI.Get_library_version().split("\n")[0].split("\0")[0].strip()
    rows = []
    for nbytes in SIZES:
        group = world.split(0)  # so that a size's windows are given back before the next
        rows.append({"bytes": nbytes, **measure(group, nbytes)})
        group.free()
        if world.rank == 0:
            print(f"{world.size} ranks, {nbytes} bytes", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    if world.rank == 0:
        print(json.dumps({"ranks": world.size, "library": library, "sizes": rows}))


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
