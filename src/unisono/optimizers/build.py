"""Construction of a recipe's optimizer for a model's parameters; those of PyTorch, and which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.optimizers import OPTIMIZERS


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


def by_decay(parameters: Iterable[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups: parameters with weight decay `decay`, and those without. No group is empty.

        weights of convolutions and linear layers, two dimensions or more     decay
        scales and shifts of norms, biases: one dimension or none             no decay (Goyal et al. 2017, section 5.1)

    The size of a norm's scale and shift, or of a bias, does not make a function rough.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    weights = {"params": [parameter for parameter in learning if parameter.ndim > 1], "weight_decay": decay}
    others = {"params": [parameter for parameter in learning if parameter.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (weights, others) if group["params"]]


def make_sgd(groups: list[dict[str, Any]], rate: float, momentum: float) -> torch.optim.Optimizer:
    """Return stochastic gradient descent with momentum."""
    return torch.optim.SGD(groups, rate, momentum=momentum)


def make_adamw(groups: list[dict[str, Any]], rate: float, _: float) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019): Adam with weight decay that is not part of the gradient; its groups
    have the betas."""
    return torch.optim.AdamW(groups, rate)
