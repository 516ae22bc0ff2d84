"""Steps of BSP whose buckets are given, by overlap: `chain`, a task a bucket, and `phases`, three (MXNET-MPI 4.3).

    main           backward 1   backward 2   ...                 computing is slept: it takes no core
    node                     sum 1        sum 2                  phases; in chain, allreduce 1, 2 by hierarchical
    communication                [allreduce 1] [allreduce 2]
    copies                                     copy 1

unisono lab --hosts 4 --ranks-per-host 2 --rate 50mbit -- python -m benchmarks.phases.run 50e6
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import unisono

SIZES = ((256 << 10, 8, 11), (1 << 20, 6, 7), (8 << 20, 3, 3))
"""Bytes of a bucket, buckets of a step, steps of each overlap."""

OVERLAPS = ("chain", "phases")


class Computed(torch.autograd.Function):
    """Layer whose gradient is given, after some seconds of the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, _: torch.Tensor, gradient: torch.Tensor, layers: Layers
    ) -> torch.Tensor:
        ctx.gradient, ctx.layers = gradient, layers
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        time.sleep(ctx.layers.gap)
        return gradients[0], ctx.gradient, None, None


class Layers(nn.Module):
    """Layers with a bucket each; `gap` are the seconds of the backward pass of one."""

    gap = 0.0

    def __init__(self, count: int, gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.own = gradients
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(len(gradients[0]))) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for weight, gradient in zip(self.weights, self.own, strict=True):
            inputs = Computed.apply(inputs, weight, gradient, self)
        return inputs

    def step(self) -> None:
        """Make the averages of all gradients."""
        self.zero_grad()
        self(torch.zeros((), requires_grad=True)).backward()


def seconds(world: unisono.World, action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank."""
    world.barrier()
    begun = time.perf_counter()
    action()
    taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    return float(world.allreduce(taken, op="maximum"))


def by_turns(world: unisono.World, actions: dict[str, Callable[[], object]], times: int) -> dict[str, list[float]]:
    """Return the seconds of each action, in turns; the first turn is not counted."""
    taken = {name: list[float]() for name in actions}
    for turn in range(times + 1):
        for name in list(actions)[:: 1 if turn % 2 else -1]:
            taken[name].append(seconds(world, actions[name]))
    return {name: each[1:] for name, each in taken.items()}


def main() -> None:
    world, rate = unisono.init(), float(sys.argv[1])
    torch.manual_seed(world.rank)
    for nbytes, count, times in SIZES:
        bound = 8 * nbytes * 2 * (world.nodes - 1) / world.nodes / rate
        gradients, models = [torch.randn(nbytes // 4) for _ in range(count)], dict[str, Layers]()
        for name in OVERLAPS:
            models[name] = Layers(count, gradients)
            rule = unisono.BSP(unisono.Exchange("hierarchical", bucket_bytes=nbytes), name)
            unisono.parallel(models[name], world, rule)
            for _ in range(3):  # prepares
                models[name].step()
        for phased, stock in zip(*(model.weights for model in models.values()), strict=True):
            torch.testing.assert_close(phased.grad, stock.grad)
        for label, gap in (("at once", 0.0), ("as computed", bound)):
            for model in models.values():
                model.gap = gap
            taken = by_turns(world, {name: model.step for name, model in models.items()}, times)
            report(world, f"{count} of {nbytes >> 10} KiB, {label}", taken, count * bound)


def report(world: unisono.World, label: str, taken: dict[str, list[float]], bound: float) -> None:
    """Print medians, ranges, the median over the bound, and the median ratio to the first of the same turn."""
    first = next(iter(taken.values()))
    cells = [
        f"{name} {1e3 * median(each):.1f} ms ({1e3 * min(each):.1f} to {1e3 * max(each):.1f}), "
        f"{median(each) / bound:.2f} of the bound, {median(a / b for a, b in zip(each, first, strict=True)):.2f}"
        for name, each in taken.items()
    ]
    if world.rank == 0:
        print(f"{label}: {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
