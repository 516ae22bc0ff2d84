"""The digits, dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import unisono
from unisono.data.builtin import load_digits
from unisono.schedules.pieces import bounds
from unisono.world import World

SMALL = unisono.Exchange(bucket_bytes=50_000)
"""Buckets of which the small network has several, and of which its largest layer is cut into some."""


def batches(world: World, steps: int, batch: int = 12) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's shares; the whole batch on a world of one."""
    data = load_digits().train
    for step in range(steps):
        mine = slice(*bounds(batch, world.size, world.rank))
        rows = torch.arange(step * batch, (step + 1) * batch)[mine] % len(data)
        yield data.inputs[rows], data.labels[rows]
