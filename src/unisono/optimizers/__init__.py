"""Optimizers that a recipe can name, LARS and LAMB among them, and the selection of parameters for weight decay.

Each optimizer has one file (those of PyTorch a function in `build.py`), and one row here.
"""

from typing import TYPE_CHECKING

from unisono.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    from unisono.optimizers.build import by_decay
    from unisono.optimizers.lamb import LAMB
    from unisono.optimizers.lars import LARS

__all__ = ["LAMB", "LARS", "OPTIMIZERS", "by_decay"]

OPTIMIZERS = Registry(
    "optimizer",
    {
        "sgd": "unisono.optimizers.build:make_sgd",
        "adamw": "unisono.optimizers.build:make_adamw",
        "lars": "unisono.optimizers.lars:make",
        "lamb": "unisono.optimizers.lamb:make",
    },
)
"""Optimizers by name. Each is made from groups of parameters with their weight decay, a rate, and a momentum."""

__getattr__ = lazy_attributes(
    __name__,
    {
        "LAMB": "unisono.optimizers.lamb",
        "LARS": "unisono.optimizers.lars",
        "by_decay": "unisono.optimizers.build",
    },
)
