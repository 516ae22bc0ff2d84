"""Exact and plain sums of the ranks of one node by turns: chrt -r 1 mpiexec -n 2 python benchmarks/exact/node.py.

Prints, for each size, the median times of the slowest rank and the median of the ratios of pairs. The tensor is written
before each call.
"""

from __future__ import annotations

import time

import torch

import unisono

SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]

WARM_UP = 4


def taken(world: unisono.World, tensor: torch.Tensor, values: torch.Tensor, wire: str | None) -> float:
    """Return the seconds of a sum."""
    tensor.copy_(values)
    world.barrier()
    begun = time.perf_counter()
    world.allreduce(tensor, wire=wire)
    return time.perf_counter() - begun


def main() -> None:
    """Print a line for each size."""
    world = unisono.init()
    for nbytes in SIZES:
        tensor = torch.randn(nbytes // 4)
        values, wires = tensor.clone(), (None, "exact")
        pairs = WARM_UP + max(12, min(200, (64 << 20) // nbytes))
        seconds = torch.zeros(pairs, 2, dtype=torch.float64)
        for pair in range(pairs):
            for wire in (pair % 2, 1 - pair % 2):  # by turns: the first call after others is slower
                seconds[pair, wire] = taken(world, tensor, values, wires[wire])
        world.allreduce(seconds, op="maximum")
        plain, exact = seconds[WARM_UP:].T
        if world.rank == 0:
            times = f"plain {1e6 * plain.median():.1f} us, exact {1e6 * exact.median():.1f} us"
            print(f"{nbytes >> 10} KiB: {times}, exact / plain {(exact / plain).median():.2f}", flush=True)


if __name__ == "__main__":
    main()
