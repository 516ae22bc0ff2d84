"""Unisono: data-parallel training of PyTorch models over MPI.

    world = unisono.init()
    model = unisono.parallel(model, world)

or, with PyTorch's own tools:

    torch.distributed.init_process_group("unisono")

Names are imported when they are first used: the command line reads recipes without starting MPI.
"""

from typing import TYPE_CHECKING

from unisono.registry import lazy_attributes
from unisono.torch_backend.register import register_with_torch

if TYPE_CHECKING:
    from unisono.data_parallel import add_samples, no_sync, own_samples, parallel, shares, synchronize
    from unisono.errors import UnisonoError
    from unisono.initialize import init
    from unisono.rules import BSP, EASGD, DiLoCo, Exchange, LocalSGD, Sharded
    from unisono.step.store import KVStore
    from unisono.training.trainer import Trainer
    from unisono.world import World

__all__ = [
    "BSP",
    "EASGD",
    "DiLoCo",
    "Exchange",
    "KVStore",
    "LocalSGD",
    "Sharded",
    "Trainer",
    "UnisonoError",
    "World",
    "add_samples",
    "init",
    "no_sync",
    "own_samples",
    "parallel",
    "shares",
    "synchronize",
]

_HOMES = {
    "unisono.data_parallel": ("add_samples", "no_sync", "own_samples", "parallel", "shares", "synchronize"),
    "unisono.errors": ("UnisonoError",),
    "unisono.initialize": ("init",),
    "unisono.rules": ("BSP", "DiLoCo", "EASGD", "Exchange", "LocalSGD", "Sharded"),
    "unisono.step.store": ("KVStore",),
    "unisono.training.trainer": ("Trainer",),
    "unisono.world": ("World",),
}

register_with_torch()

__getattr__ = lazy_attributes(__name__, {name: module for module, names in _HOMES.items() for name in names})


def __dir__() -> list[str]:
    return list(__all__)
