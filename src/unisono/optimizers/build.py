"""Construction of a recipe's optimizer for a model's parameters."""

from __future__ import annotations

import torch

from unisono.optimizers import OPTIMIZERS
from unisono.optimizers.groups import by_decay


def make_optimizer(
    name: str,
    model: torch.nn.Module,
    rate: float,
    momentum: float,
    decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Return the optimizer of that name for a model's parameters. Those of one dimension have no weight decay. `betas`
    are AdamW's.

    Raises UsageError, listing the names, for an unknown one.
    """
    made: torch.optim.Optimizer = OPTIMIZERS.load(name)(by_decay(model.parameters(), decay), rate, momentum, betas)
    return made
