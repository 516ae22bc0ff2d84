"""One rank: times the MPI library's own allreduce. Needs mpi4py and NumPy alone, so that it runs beside another MPI."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

BUDGET = 6.0


def times(nbytes: int) -> list[float]:
    """Seconds a call, the slowest rank's, of several trials."""
    world = MPI.COMM_WORLD
    payload = np.zeros(nbytes // 4, np.float32)
    world.Allreduce(MPI.IN_PLACE, payload)
    samples: list[float] = []
    repeat = 1
    spent = 0.0
    while len(samples) < 3 or (len(samples) < 31 and spent < BUDGET):
        world.Barrier()
        start = time.perf_counter()
        for _ in range(repeat):
            world.Allreduce(MPI.IN_PLACE, payload)
        took = world.allreduce((time.perf_counter() - start) / repeat, MPI.MAX)
        if repeat == 1 and took < 1e-3:
            repeat = max(2, min(200, int(4e-3 / took)))
            continue
        samples.append(took)
        spent += took * repeat
    return samples


def main() -> None:
    """Write {bytes: median microseconds} to the file named first, for the sizes named after it."""
    path, *sizes = sys.argv[1:]
    medians = {size: statistics.median(times(int(size))) * 1e6 for size in sizes}
    if MPI.COMM_WORLD.rank == 0:
        version = MPI.Get_library_version().splitlines()[0].split(",")[0].strip()
        Path(path).write_text(json.dumps({"library": version, "median_us": medians}) + "\n")


if __name__ == "__main__":
    main()
