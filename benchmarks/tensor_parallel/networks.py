"""Networks of the benchmark of split layers, narrower than the published ones, with their samples and plans.

VGG-A       3 x 64 x 64 ─ convolutions 16, 32, 64 64, 128 128, 128 128, a pool after each ─ 512 ─ 1,536 ─ 1,536 ─ 1,000
AlexNet     3 x 64 x 64 ─ 11x11/4, 48 ─ pool ─ 5x5, 128 ─ pool ─ 192 ─ 192 ─ 128 ─ pool ─ 128 ─ 1,536 ─ 1,536 ─ 1,000
CD-DNN      440 ─ 7 of 1,024 ─ 4,648

All ranks share the memory and cores of one machine. VGG-A's convolutions are a quarter as wide, AlexNet's half, CD-DNN
(PCL-DNN 5.4) half; weights are in the wide layers as in the originals: 89, 87 and 100% (93, 96 and 100%).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from unisono.world import World

Layers = list[nn.Module]


class Problem(NamedTuple):
    """Network, as the layers before the wide ones and the widths of those, and the batch of all ranks."""

    features: Callable[[], Layers]
    shape: tuple[int, ...]
    """Shape of a sample."""
    widths: tuple[int, ...]
    batch: int


def vgg_a() -> Layers:
    """Return VGG-A's convolutions, a quarter as wide: 64 x 64 images become 512 features."""
    layers, inputs = Layers(), 3
    for width, depth in ((16, 1), (32, 1), (64, 2), (128, 2), (128, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return layers


def alexnet() -> Layers:
    """Return AlexNet's convolutions, half as wide: 64 x 64 images become 128 features."""
    first = [nn.Conv2d(3, 48, 11, 4, 2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]
    second = [nn.Conv2d(48, 128, 5, padding=2, groups=2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]
    third = [nn.Conv2d(128, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1, groups=2), nn.ReLU()]
    return [*first, *second, *third, nn.Conv2d(192, 128, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2)]


PROBLEMS = {
    "VGG-A": Problem(vgg_a, (3, 64, 64), (512, 1536, 1536, 1000), 32),
    "AlexNet": Problem(alexnet, (3, 64, 64), (128, 1536, 1536, 1000), 64),
    "CD-DNN": Problem(Layers, (440,), (440, *[1024] * 7, 4648), 64),
}


def share(problem: Problem, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of the batch, and their labels."""
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(problem.batch, *problem.shape, generator=made)
    labels = torch.randint(problem.widths[-1], (problem.batch,), generator=made)
    return inputs.chunk(world.size)[world.rank], labels.chunk(world.size)[world.rank]


def network(problem: Problem) -> nn.Sequential:
    """Return the network, (features, wide layers), with the same weights every time."""
    torch.manual_seed(1)
    features, wide = problem.features(), Layers()
    for inputs, outputs in zip(problem.widths, problem.widths[1:], strict=False):
        wide += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(nn.Sequential(*features, nn.Flatten()), nn.Sequential(*wide[:-1]))


def words(problem: Problem) -> dict[str, str]:
    """Return the splits of the wide layers, without sizes: pairs, of which the last takes in an odd layer behind it."""
    names = [f"1.{2 * index}" for index in range(len(problem.widths) - 1)]
    how = ["column gives part", "row takes part"] * (len(names) // 2)
    if len(names) % 2:
        how[-1:] = ["row takes part gives part", "row takes part"]
    return dict(zip(names, how, strict=True))


def plan_of(problem: Problem, size: int) -> dict[str, str]:
    """Return the plan that splits all wide layers over groups of `size`; of no layers for groups of 1."""
    return {name: how.replace(" ", f" {size} ", 1) for name, how in words(problem).items() if size > 1}
