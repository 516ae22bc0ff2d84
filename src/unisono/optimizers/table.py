"""The optimizers that a recipe can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.optimizers.groups import by_decay
from unisono.optimizers.lamb import LAMB
from unisono.optimizers.lars import LARS

Groups = list[dict[str, Any]]

OPTIMIZERS: dict[str, Callable[[Groups, float, float], torch.optim.Optimizer]] = {
    "sgd": lambda groups, rate, momentum: torch.optim.SGD(groups, rate, momentum=momentum),
    "lars": lambda groups, rate, momentum: LARS(groups, rate, momentum=momentum),
    "lamb": lambda groups, rate, momentum: LAMB(groups, rate, betas=(momentum, 0.999)),
}
"""Each is made for groups of parameters with their weight decay, a rate, and a momentum (LAMB's first beta)."""


def make_optimizer(
    name: str, model: torch.nn.Module, rate: float, momentum: float, decay: float
) -> torch.optim.Optimizer:
    """The optimizer of that name for a model's parameters; those of one dimension do not decay."""
    return OPTIMIZERS[name](by_decay(model.parameters(), decay), rate, momentum)
