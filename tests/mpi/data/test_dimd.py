"""DIMD's three calls on real ranks, on one node and as if on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unisono.data import partitioned_load
from unisono.data.pack.index import read_index
from unisono.errors import UsageError
from unisono.world import World

SAMPLES = 101


@pytest.mark.parametrize("copies", ["one", "each rank", "chosen"])
def test_samples_stay_once_in_each_group_and_batches_are_theirs(
    group: World, spread: World, packs: Path, copies: str
) -> None:
    about = read_index(packs / "train").about
    for world in (group, spread):
        groups = {"one": 1, "each rank": world.size, "chosen": None}[copies]
        with partitioned_load(packs, world, groups=groups, seed=world.size) as data:
            for _ in range(3):
                held = world.all_gather_object(data.numbers.tolist())
                if copies == "one":
                    assert sorted(sample for own in held for sample in own) == list(range(SAMPLES))
                else:
                    assert held == [list(range(SAMPLES))] * world.size
                for _ in range(5 + world.rank):  # not collective: ranks draw as often as they like
                    inputs, labels = data.random_batch(8)
                    pixels = ((inputs[:, 0, 0, :2] * about.std[0] + about.mean[0]) * 255).round()
                    numbers = (pixels[:, 0] + 256 * pixels[:, 1]).int()
                    assert set(numbers.tolist()) <= set(held[world.rank])
                    assert torch.equal(labels, numbers.long() * 3 // SAMPLES)
                data.shuffle()


def test_batches_are_a_function_of_the_seed(group: World, packs: Path) -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        with partitioned_load(packs, group, groups=1, seed=seed, augment="shift") as data:
            batches = [data.random_batch(8)[0].clone() for _ in range(4)]
            data.shuffle()
            return [*batches, data.random_batch(8)[0].clone()]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))
    for seed in (-1, 1 << 64):
        with pytest.raises(UsageError, match=f"seed = {seed}; it is"):
            drawn(seed)
