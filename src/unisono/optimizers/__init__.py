"""Optimizers that a recipe can name, LARS and LAMB among them, and the selection of parameters for weight decay.

Each optimizer is a class with one row here; `make_optimizer` has the options that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from unisono.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    import torch

    from unisono.optimizers.layerwise import LAMB, LARS

__all__ = ["LAMB", "LARS", "OPTIMIZERS", "by_decay"]

OPTIMIZERS = Registry(
    "optimizer",
    {
        "sgd": "torch.optim:SGD",
        "adamw": "torch.optim:AdamW",
        "lars": "unisono.optimizers.layerwise:LARS",
        "lamb": "unisono.optimizers.layerwise:LAMB",
    },
)
"""Classes of optimizers by name. Each is made from groups of parameters with their weight decay, and a rate."""

__getattr__ = lazy_attributes(__name__, dict.fromkeys(("LAMB", "LARS"), "unisono.optimizers.layerwise"))


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
    `nesterov` is for "sgd", `betas` are for "adamw"; the momentum is the first beta of "lamb".

    Raises UsageError, listing the names, for an unknown one.
    """
    kind: Callable[..., torch.optim.Optimizer] = OPTIMIZERS.load(name)
    options: dict[str, dict[str, Any]] = {
        "sgd": {"momentum": momentum, "nesterov": nesterov},
        "adamw": {"betas": betas},
        "lars": {"momentum": momentum},
        "lamb": {"betas": (momentum, 0.999)},
    }
    return kind(by_decay(model.parameters(), decay), rate, **options.get(name, {}))


def by_decay(parameters: Iterable[torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups: parameters with weight decay `decay`, and those without. No group is empty.

        weights of convolutions and linear layers, two dimensions or more     decay
        scales and shifts of norms, biases: one dimension or none             no decay (Goyal et al. 2017, section 5.1)

    The size of a norm's scale and shift, or of a bias, does not make a function rough.
    """
    learning = [parameter for parameter in parameters if parameter.requires_grad]
    weights = {"params": [parameter for parameter in learning if parameter.ndim > 1], "weight_decay": decay}
    undecayed = {"params": [parameter for parameter in learning if parameter.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (weights, undecayed) if group["params"]]
