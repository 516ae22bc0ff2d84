"""Batches for loops that others wrote, on real ranks: equal shares need no declaration of their samples."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch

import unisono
from unisono.data import Loader
from unisono.world import World

BATCH, STEPS = 24, 4
"""Of 101 samples: four whole steps, and a short one."""


def trained(packs: Path, world: World) -> torch.Tensor:
    """Weights after two epochs of a loop that collects two batches for each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)).double()
    parallel = unisono.parallel(model, world)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.05, momentum=0.9)
    with Loader(packs, world, BATCH, seed=4, augment="shift") as loader:
        dataset = loader.dataset()
        assert len(dataset) == STEPS
        for _ in range(2):
            batches = iter(dataset)
            while collected := list(islice(batches, 2)):
                inputs, labels = (torch.cat(parts) for parts in zip(*collected, strict=True))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(parallel(inputs.double()), labels).backward()
                optimizer.step()
        assert (loader.epoch, loader.step) == (2, 0)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_loop_on_all_ranks_gives_the_weights_of_one(group: World, packs: Path) -> None:
    alone = group.split(group.rank)
    expected = trained(packs, alone)
    torch.testing.assert_close(trained(packs, group), expected, rtol=1e-9, atol=1e-9)
    alone.free()
