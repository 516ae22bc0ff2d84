"""Make 1,000 models parallel in one world, one after another or all alive: print what this rank holds meanwhile.

    mpiexec -n 2 python benchmarks/many_models/run.py [--alive] [--models 1000]

Memory, threads, mappings and files must level off; with `--alive`, memory grows by the models' own alone.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import torch

import unisono


def held() -> str:
    """Return what this process holds, in words."""
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in rollup if line.startswith("Rss")) >> 10
    maps = Path("/proc/self/maps").read_text()
    files = len(list(Path("/proc/self/fd").iterdir()))
    return (
        f"{resident} MB resident, {threading.active_count()} threads, {files} files, "
        f"{maps.count('/memfd:unisono-')} mappings of gradients, {maps.count('/dev/shm')} of /dev/shm"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--alive", action="store_true", help="keep all models")
    parser.add_argument("--width", type=int, default=300)
    options = parser.parse_args()
    world = unisono.init()
    kept: list[torch.nn.Module] = []
    for count in range(1, options.models + 1):
        model = unisono.parallel(torch.nn.Linear(options.width, options.width), world, unisono.BSP(overlap="chain"))
        model(torch.ones(2, options.width)).sum().backward()
        if options.alive:
            kept.append(model)
        del model
        if world.rank == 0 and (count == 1 or count % max(1, options.models // 10) == 0):
            print(f"{count} models: {held()}", flush=True)


if __name__ == "__main__":
    main()
