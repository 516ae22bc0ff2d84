"""Unisono: data-parallel training of PyTorch models over MPI.

    world = unisono.init()
    model = unisono.parallel(model, world)

or, with PyTorch's own tools:

    torch.distributed.init_process_group("unisono")

Names are loaded when they are first used: the command line reads recipes without starting MPI.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.torch_backend.register import register_with_torch

if TYPE_CHECKING:
    from unisono.errors import UnisonoError
    from unisono.rules import BSP, Exchange, add_samples, no_sync, parallel, synchronize
    from unisono.training.trainer import Trainer
    from unisono.world import World, init

__all__ = [
    "BSP",
    "Exchange",
    "Trainer",
    "UnisonoError",
    "World",
    "add_samples",
    "init",
    "no_sync",
    "parallel",
    "synchronize",
]

_HOMES = {
    "BSP": "unisono.rules",
    "Exchange": "unisono.rules",
    "Trainer": "unisono.training.trainer",
    "UnisonoError": "unisono.errors",
    "World": "unisono.world",
    "add_samples": "unisono.rules",
    "init": "unisono.world",
    "no_sync": "unisono.rules",
    "parallel": "unisono.rules",
    "synchronize": "unisono.rules",
}

register_with_torch()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
