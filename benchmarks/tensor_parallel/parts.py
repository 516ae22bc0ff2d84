"""Times of a pair of split layers of 4,096 features in the lab, with exchanges in slices and without, by turns.

unisono lab --hosts 4 --rate 100mbit -- python benchmarks/tensor_parallel/parts.py OUT.json [ROWS ...]

4,096 ─▶ 4,096 ─▶ 4,096 features, float32, over all ranks: a column that gives its part, a row that takes it. A step is
a forward and a backward pass. Its bound is the larger of the products alone and of the two sums alone, in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.model import split_model
from unisono.tensor_parallel.overlap.slices import SliceLimits
from unisono.world import World

FEATURES = 4096
LIMITS = {
    "waited for": SliceLimits(1, 1, 1, 1),
    "2 slices": SliceLimits(1, 1, 2, 2),
    "4 slices": SliceLimits(1, 1, 4, 4),
    "8 slices": SliceLimits(1, 1, 8, 8),
}
ROUNDS = 5


def measured(world: World, step: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank takes for a step that all begin together."""
    world.barrier()
    began = time.perf_counter()
    step()
    return max(world.all_gather_object(time.perf_counter() - began))


def measure(world: World, rows: int) -> dict[str, list[float]]:
    """Return the seconds of each step with each form, of its products and of its sums, in ascending order."""
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES, bias=False))
    split_model(pair, world, {"0": "column gives part", "2": "row takes part"})
    alone = nn.Sequential(nn.Linear(FEATURES, FEATURES // world.size), nn.ReLU())
    alone.append(nn.Linear(FEATURES // world.size, FEATURES, bias=False))
    x, y = torch.randn(rows, FEATURES, requires_grad=True), torch.randn(rows, FEATURES)
    zeros = torch.zeros(rows, FEATURES)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        x.grad = None
        model(x).backward(y)

    def step_of(limits: SliceLimits) -> None:
        for layer in pair.modules():
            if isinstance(layer, ParallelLayer):
                layer.limits = limits
        step(pair)

    forms: dict[str, Callable[[], object]] = {
        name: lambda limits=limits: step_of(limits) for name, limits in LIMITS.items()
    }
    forms |= {
        "products alone": lambda: step(alone),
        "sums alone": lambda: [pair[0].group.allreduce(sums) for sums in (zeros, zeros)],
    }
    took: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(ROUNDS + 1):
        for name, form in forms.items():
            seconds = measured(world, form)
            if number:  # the first round prepares collectives
                took[name].append(seconds)
    return {name: sorted(each) for name, each in took.items()}


def main(output: str, *rows: str) -> None:
    """Measure, and write what was found."""
    world = unisono.init()
    torch.set_num_threads(1)
    found = {}
    for count in map(int, rows or ("128", "512")):
        found[count] = measure(world, count)
        if world.rank == 0:
            medians = {name: statistics.median(seconds) for name, seconds in found[count].items()}
            print(count, "rows:", ", ".join(f"{name} {median:.3f} s" for name, median in medians.items()), flush=True)
    if world.rank == 0:
        content = {"ranks": world.size, "features": FEATURES, "seconds": found}
        Path(output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
