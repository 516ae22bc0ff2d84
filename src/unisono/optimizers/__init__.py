"""Optimizers that a recipe can name, LARS and LAMB among them, and the selection of parameters for weight decay.

Each optimizer has a function that makes it, and one row here.
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
        "sgd": "unisono.optimizers.build:make_sgd",
        "adamw": "unisono.optimizers.build:make_adamw",
        "lars": "unisono.optimizers.layerwise:make_lars",
        "lamb": "unisono.optimizers.layerwise:make_lamb",
    },
)
"""Optimizers by name. Each is made from groups of parameters with their weight decay, a rate, and a momentum."""

__getattr__ = lazy_attributes(
    __name__,
    {
        "LAMB": "unisono.optimizers.layerwise",
        "LARS": "unisono.optimizers.layerwise",
        "by_decay": "unisono.optimizers.build",
    },
)
