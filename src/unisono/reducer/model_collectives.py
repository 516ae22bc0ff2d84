"""Collectives about one model besides its gradients. They run one at a time with all other exchanges of the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from unisono.engine.communicator_pool import CommunicatorPool, call_labelled
from unisono.world import World

Result = TypeVar("Result")


class ModelCollectives:
    """Collectives of the main thread on the first communicator of `exchanges`, labelled with the name of a user."""

    def __init__(self, pool: CommunicatorPool, user: str) -> None:
        self._pool = pool
        self._label = f" [{user}]"
        world = pool.worlds(1)[0]
        self.rank, self.size, self.nodes = world.rank, world.size, world.nodes

    def call(self, act: Callable[[World], Result]) -> Result:
        """Return the result of `act`, which all ranks call together."""
        results: list[Result] = []
        world = self._pool.worlds(1)[0]

        def carry_out() -> None:
            call_labelled(world, self._label, lambda _: results.append(act(world)))

        self._pool.engine.carry_out(carry_out, (), (self._pool.exclusive(0),), "collective")
        return results[0]

    def all_gather_object(self, value: Result) -> list[Result]:
        """Return the values of all ranks, by rank (pickled)."""
        return self.call(lambda world: world.all_gather_object(value))

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's `tensor` to every rank, in place, and return it."""
        return self.call(lambda world: world.broadcast(tensor))

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` over all ranks with `op`, in place, and return it."""
        return self.call(lambda world: world.allreduce(tensor, op=op))
