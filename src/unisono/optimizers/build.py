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
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.999),
) -> torch.optim.Optimizer:
    """Return the optimizer of that name for a model's parameters. Those of one dimension have no weight decay.
    `nesterov` is for "sgd", `betas` are for "adamw".

    Raises UsageError, listing the names, for an unknown one.
    """
    groups = by_decay(model.parameters(), decay)
    if nesterov:
        groups = [{**group, "nesterov": True} for group in groups]
    if name == "adamw":
        groups = [{**group, "betas": betas} for group in groups]
    made: torch.optim.Optimizer = OPTIMIZERS.load(name)(groups, rate, momentum)
    return made
