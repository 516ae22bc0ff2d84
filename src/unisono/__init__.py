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
    from unisono.data_parallel import add_samples, no_sync, parallel, synchronize
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
    "parallel",
    "synchronize",
]

_HOMES = {
    "BSP": "unisono.rules",
    "DiLoCo": "unisono.rules",
    "EASGD": "unisono.rules",
    "Exchange": "unisono.rules",
    "KVStore": "unisono.step.store",
    "LocalSGD": "unisono.rules",
    "Sharded": "unisono.rules",
    "Trainer": "unisono.training.trainer",
    "UnisonoError": "unisono.errors",
    "World": "unisono.world",
    "add_samples": "unisono.data_parallel",
    "init": "unisono.initialize",
    "no_sync": "unisono.data_parallel",
    "parallel": "unisono.data_parallel",
    "synchronize": "unisono.data_parallel",
}

register_with_torch()


__getattr__ = lazy_attributes(__name__, _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
