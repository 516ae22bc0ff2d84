"""Unisono: data-parallel training of PyTorch models over MPI.

    world = unisono.init()
    model = unisono.parallel(model, world)
"""

from unisono.errors import UnisonoError
from unisono.world import World, init

__all__ = ["UnisonoError", "World", "init"]
