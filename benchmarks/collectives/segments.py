"""Long allreduces through sockets, in segments, beside the same schedules as messages of MPI, by turns.

unisono lab --hosts 2 --rate 10gbit -- python benchmarks/collectives/segments.py OUT.json 1.25e9

1.25e9: bytes per second of a link. Written: median and range of the seconds, the bound that the links set, and the
processor seconds of all ranks.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unisono
from unisono.processor import processor
from unisono.transports import sockets
from unisono.world import World

SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ALGORITHMS = ("ring", "halving")
ROUNDS, CALLS = 5, 4


def processor_seconds() -> float:
    """Return the seconds that this process has computed, the kernel's for it included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def by(world: World, transport: str) -> World:
    """Return a world of the same ranks that sums by "sockets", or by "messages"."""
    os.environ[sockets.VARIABLE] = "on" if transport == "sockets" else "off"
    made = world.dup()
    made.allreduce(torch.ones(1 << 16))  # connects, or does not
    return made


def main(output: str, rate: str) -> None:
    """Measure all sizes; write OUTPUT on rank 0."""
    world = unisono.init()
    worlds = {transport: by(world, transport) for transport in ("messages", "sockets")}
    rows = []
    for nbytes in SIZES:
        tensor = torch.ones(nbytes // 4)
        bound = 2 * (world.size - 1) / world.size * nbytes / float(rate)
        kinds = [(algorithm, transport) for algorithm in ALGORITHMS for transport in worlds]
        seconds: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
        used = dict.fromkeys(kinds, 0.0)
        for _ in range(ROUNDS):
            for algorithm, transport in kinds:
                worlds[transport].allreduce(tensor.fill_(1), algorithm)
                before = processor_seconds()
                for _ in range(CALLS):
                    tensor.fill_(1)
                    world.barrier()
                    began = time.perf_counter()
                    worlds[transport].allreduce(tensor, algorithm)
                    seconds[algorithm, transport].append(time.perf_counter() - began)
                used[algorithm, transport] += sum(world.all_gather_object(processor_seconds() - before))
        for algorithm, transport in kinds:
            took = seconds[algorithm, transport]
            row: dict[str, Any] = {"bytes": nbytes, "algorithm": algorithm, "transport": transport}
            row |= {"median_s": statistics.median(took), "least_s": min(took), "most_s": max(took), "bound_s": bound}
            row["processor_s"] = used[algorithm, transport] / (ROUNDS * CALLS)
            rows.append(row)
            if world.rank == 0:
                times = f"{row['median_s'] * 1e3:8.2f} ms, {row['median_s'] / bound:5.2f} of the bound"
                print(
                    f"{nbytes:9} {algorithm:8} {transport:9} {times}, {row['processor_s'] * 1e3:7.1f} ms of processors"
                )
    if world.rank == 0:
        result = {"hosts": world.size, "bytes_per_second": float(rate), "processor": processor().name, "rows": rows}
        Path(output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
