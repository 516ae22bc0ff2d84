"""Optimizers that a recipe can name, LARS and LAMB among them, and the selection of parameters for weight decay.

Each optimizer is a class with one row here; `build.py` has the options that it takes.
"""

from typing import TYPE_CHECKING

from unisono.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    from unisono.optimizers.build import by_decay
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

__getattr__ = lazy_attributes(
    __name__,
    {
        "LAMB": "unisono.optimizers.layerwise",
        "LARS": "unisono.optimizers.layerwise",
        "by_decay": "unisono.optimizers.build",
    },
)
