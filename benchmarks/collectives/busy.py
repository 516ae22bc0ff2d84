"""All-reduces of two ranks beside other programs, ours and MPI_Allreduce by turns: python busy.py [OUT.json].

Busy loops, two of a nice level, take turns with the ranks on the cores: without them, at level 19 and at level 0.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

KIB = (4, 64, 1024, 4096, 16384)
UNTIMED, MAX_CALLS, MAX_KIB = 25, 100, 8000
LOOPS = {"no other program": (), "two busy loops, nice 19": ("nice", "-n", "19"), "two busy loops": ("nice", "-n", "0")}


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Return the medians and means of both in microseconds, by size."""
    import torch  # noqa: PLC0415 - ranks alone need it

    import unisono  # noqa: PLC0415

    world = unisono.init()
    from mpi4py import MPI  # noqa: PLC0415 - MPI has begun

    results = {}
    for kib in KIB:
        tensor = torch.randn(kib * 256)
        array = tensor.numpy()
        calls = {
            "unisono": lambda tensor=tensor: world.allreduce(tensor),
            "library": lambda array=array: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array),
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(UNTIMED + max(5, min(MAX_CALLS, MAX_KIB // kib))):
            for name in sorted(calls, reverse=bool(number % 2)):
                tensor.uniform_(-1, 1)
                world.barrier()
                begun = time.perf_counter()
                calls[name]()
                if number >= UNTIMED:
                    taken[name].append(1e6 * (time.perf_counter() - begun))
        results[f"{kib} KiB"] = {
            name: {"median": statistics.median(times), "mean": statistics.mean(times)} for name, times in taken.items()
        }
    return results if world.rank == 0 else {}


def main(output: str = "") -> None:
    """Start the loops and the ranks, and print a table."""
    measured = {}
    for title, nice in LOOPS.items():
        loops = [subprocess.Popen([*nice, sys.executable, "-c", "while True: pass"]) for _ in range(2 if nice else 0)]
        try:
            ranks = ["mpiexec", "-n", "2", sys.executable, __file__, "ranks"]
            measured[title] = json.loads(subprocess.run(ranks, check=True, capture_output=True, text=True).stdout)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
        print(f"{title}; us, medians: Unisono, the library; their ratio; that of means")
        for size, times in measured[title].items():
            ours, library = times["unisono"], times["library"]
            ratios = ours["median"] / library["median"], ours["mean"] / library["mean"]
            print(f"  {size:>9} {ours['median']:10.1f} {library['median']:10.1f} {ratios[0]:6.2f} {ratios[1]:6.2f}")
    if output:
        Path(output).write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["ranks"]:
        if results := measure():
            print(json.dumps(results))
    else:
        main(*sys.argv[1:])
