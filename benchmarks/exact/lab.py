"""Cost of exact sums between hosts: sums, and steps of digits, ResNet-50 and VGG-A, beside the plain ones by turns.

unisono lab --hosts 4 --rate 1gbit -- python benchmarks/exact/lab.py OUT.json

Networks and images are of the papers' sizes, with two images a rank; V = p. Both kinds of steps are of one program; a
pair of steps, one of each kind, has a ratio. A rank holds both networks: VGG-A's take 4 GB a rank.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unisono
from unisono.data.builtin import load_digits
from unisono.models import input_shape, make_network
from unisono.world import World

SUMS = {64 << 10: 40, 1 << 20: 20, 4 << 20: 10, 16 << 20: 5}
"""Rounds for each number of bytes."""

STEPS = {"small_convnet": 60, "resnet50": 8, "vgg_a": 10}
"""Rounds for each network."""

WARMUP = 2
IMAGES, CLASSES = 2, 1000


def compared(
    world: World, what: str, rounds: int, plain: Callable[[], object], exact: Callable[[], object]
) -> dict[str, Any]:
    """Return the median seconds of both, which take turns, by the slowest rank's of each round, and their ratios."""
    seconds: dict[str, list[float]] = {"plain": [], "exact": []}
    for number in range(WARMUP + rounds):
        order = (("plain", plain), ("exact", exact))
        for name, act in order if number % 2 else order[::-1]:
            world.barrier()
            began = time.perf_counter()
            act()
            took = max(world.all_gather_object(time.perf_counter() - began))
            seconds[name] += [took] if number >= WARMUP else []
    ratios = sorted(late / early for early, late in zip(*seconds.values(), strict=True))
    found: dict[str, Any] = {name: statistics.median(each) for name, each in seconds.items()}
    found = {"what": what, **found, "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    if world.rank == 0:
        print("  ".join(f"{value:.4g}" if isinstance(value, float) else value for value in found.values()), flush=True)
    return found


def sums(world: World) -> list[dict[str, Any]]:
    """Return the costs of sums of tensors."""
    found = []
    for nbytes, rounds in SUMS.items():
        tensor = torch.randn(nbytes // 4)
        exact = lambda one=tensor: world.allreduce(one.mul_(0.1), wire="exact")  # noqa: E731
        plain = lambda one=tensor: world.allreduce(one.mul_(0.1))  # noqa: E731
        found.append(compared(world, f"allreduce of {nbytes >> 10} KiB", rounds, plain, exact))
    return found


def steps(world: World, name: str, rounds: int) -> dict[str, Any]:
    """Return the cost of a step of a network."""
    small, made = name == "small_convnet", torch.Generator().manual_seed(world.rank)
    data = load_digits().train
    rows = slice(64 * world.rank, 64 * (world.rank + 1))
    inputs = data.inputs[rows] if small else torch.randn(IMAGES, *input_shape(name), generator=made)
    labels = data.labels[rows] if small else torch.randint(CLASSES, (IMAGES,), generator=made)
    acts = []
    for shares in (0, world.size):
        torch.manual_seed(0)
        model = make_network(name, "", 10 if small else CLASSES, len(inputs[0]))
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        trainer = unisono.Trainer(model, world, unisono.BSP(overlap="chain"), optimizer, virtual_ranks=shares)

        def step(trainer: unisono.Trainer = trainer) -> None:
            trainer.step(inputs, labels)
            trainer.wait()

        acts.append(step)
    return compared(world, f"step of {name}, {len(inputs)} samples a rank", rounds, *acts)


def main(output: str, *names: str) -> None:
    """Measure sums, and the steps of all networks or of some."""
    torch.set_num_threads(1)
    world, found = unisono.init(), list[dict[str, Any]]()
    found += sums(world)
    for name, rounds in STEPS.items():
        if not names or name in names:
            found.append(steps(world, name, rounds))
            gc.collect()
    if world.rank == 0:
        Path(output).write_text(json.dumps({"ranks": world.size, "costs": found}, indent=1) + "\n")
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
