"""Cost of exact sums between hosts: sums, and steps of digits, ResNet-50 and VGG-A, beside the plain ones by turns.

unisono lab --hosts 4 --rate 1gbit -- python benchmarks/exact/lab.py OUT.json

Networks and images are of the papers' sizes, with two images a rank; V = p. Both kinds of steps are of one program; a
pair of steps, one of each kind, has a ratio. A rank holds both networks: VGG-A's take 4 GB a rank.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import compared

import unisono
from unisono.data.builtin import load_digits
from unisono.models import input_shape, make_network
from unisono.world import World

SUMS = {4 << 10: 43, 64 << 10: 43, 256 << 10: 43, 1 << 20: 23, 4 << 20: 13, 16 << 20: 8}
"""Rounds for each number of bytes; the first three do not count."""

STEPS = {"small_convnet": 203, "resnet50": 11, "vgg_a": 13}
"""Rounds for each network; the first three do not count."""

IMAGES, CLASSES = 2, 1000


def sums(world: World) -> list[dict[str, Any]]:
    """Return the costs of sums of tensors."""
    costs = []
    for nbytes, rounds in SUMS.items():
        tensor = torch.randn(nbytes // 4)
        plain, exact = partial(world.allreduce, tensor), partial(world.allreduce, tensor, wire="exact")
        what = f"allreduce of {nbytes >> 10} KiB"
        costs.append(compared(world, what, plain, exact, partial(tensor.mul_, 0.1), rounds))
    return costs


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
    return compared(world, f"step of {name}, {len(inputs)} samples a rank", *acts, lambda: None, rounds)


def main(output: str, *names: str) -> None:
    """Measure sums, and the steps of all networks or of some."""
    torch.set_num_threads(1)
    world, costs = unisono.init(), list[dict[str, Any]]()
    costs += sums(world)
    for name, rounds in STEPS.items():
        if not names or name in names:
            costs.append(steps(world, name, rounds))
            gc.collect()
    if world.rank == 0:
        print(*costs, sep="\n")
        Path(output).write_text(json.dumps({"ranks": world.size, "costs": costs}, indent=1) + "\n")
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
