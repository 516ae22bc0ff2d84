"""Communicators and threads for exchanges, created once per world and shared by all its users.

    model 1   exchange 1 of model 1 │                  exchange 2 of model 1 │
    model 2                         │ exchange 1 of model 2 │                        one communicator: one at a time

Exchanges of one communicator run one at a time, in the order in which they are pushed. Each is labelled, so that ranks
that push in different orders get an error, and never add one model's gradients to another's.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Protocol, TypeVar

import torch

from unisono.engine.dependencies import ExclusiveVariable
from unisono.engine.engine import Closing, Engine, weakly
from unisono.placement import Partition
from unisono.world import World

Result = TypeVar("Result")


class CommunicatorUser(Protocol):
    """Object whose exchanges are carried out here; it is held by a weak reference only."""

    def finish(self) -> None:
        """Wait for the work under way: the program ends."""

    def release(self) -> None:
        """Stop using the world: it is about to be freed."""


class CommunicatorPool(Closing):
    """Engine and communicators of a world. Created by all its ranks together."""

    def __init__(self, world: World) -> None:
        self.engine = Engine(dict.fromkeys(("communication", "update", "computing", "node", "copies"), 1))
        self._world, self._dups = world, list[World]()
        self._exclusive: dict[int, ExclusiveVariable] = {}
        self._parts: dict[Partition, list[World]] = {}  # worlds of this rank's groups
        self._users: weakref.WeakSet[CommunicatorUser] = weakref.WeakSet()
        self.numbers = count(1)
        """Numbers of users, the same on all ranks."""
        self._at_exit = weakly(self.finish)
        atexit.register(self._at_exit)

    def worlds(self, count: int) -> list[World]:
        """Return the first `count` duplicates of the world; missing ones are created, by all ranks together."""
        if len(self._dups) < count:
            self._extend(self._dups, self._world.dup, count, "dup")
            self.engine.grow("communication", count)
        return self._dups[:count]

    def part_worlds(self, partition: Partition, count: int) -> tuple[tuple[int, ...], list[World]]:
        """Return this rank's group in a partition of all ranks, and the first `count` worlds of that group.

        Missing ones are created, by all ranks together.
        """
        first = self.worlds(1)[0]
        worlds = self._parts.setdefault(partition, [])
        if len(worlds) < count:
            self._extend(worlds, partial(first.group_world, partition), count, "split")
        return next(group for group in partition if first.rank in group), worlds[:count]

    def _extend(self, worlds: list[World], first: Callable[[], World], count: int, name: str) -> None:
        """Create worlds up to `count`: the `first`, and duplicates of it."""

        def create() -> None:
            while len(worlds) < count:
                worlds.append(worlds[0].dup() if worlds else first())

        # exclusive: other operations may use the first one
        self.engine.carry_out(create, (), (self.exclusive(0),), name)

    def exclusive(self, communicator: int) -> ExclusiveVariable:
        """Return the variable that keeps the exchanges of a communicator in order."""
        return self._exclusive.setdefault(communicator, ExclusiveVariable(f"communicator {communicator}"))

    def register(self, user: CommunicatorUser) -> None:
        """Register a user, once it is complete, to be notified when its exchanges have to end."""
        self._users.add(user)

    def finish(self) -> None:
        """Wait for the work under way of all users."""
        for user in list(self._users):
            user.finish()

    def close(self) -> None:
        """End the threads, once all work is over: the world is about to be freed."""
        atexit.unregister(self._at_exit)
        for user in list(self._users):
            user.release()
        self.engine.close()


class ModelCollectives:
    """Collectives about one model besides its gradients, labelled with its name: of the main thread, on the first
    communicator of a pool. They run one at a time with all other exchanges of the world."""

    def __init__(self, pool: CommunicatorPool, user: str) -> None:
        self.pool, self.user = pool, user
        self._label, world = f" [{user}]", pool.worlds(1)[0]
        self.rank, self.size, self.nodes = world.rank, world.size, world.nodes
        self.placement = world.placement

    def call(self, act: Callable[[World], Result]) -> Result:
        """Return the result of `act`, which all ranks call together."""
        results: list[Result] = []
        world = self.pool.worlds(1)[0]

        def carry_out() -> None:
            with world.labelled(self._label):
                results.append(act(world))

        self.pool.engine.carry_out(carry_out, (), (self.pool.exclusive(0),), "collective")
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
