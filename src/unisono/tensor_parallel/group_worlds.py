"""Worlds of groups of ranks, created once per world by all its ranks together, and freed with it.

partition ((0, 1), (2, 3)) of 4 ranks      rank 2: a world of two, in which it is rank 0
"""

from __future__ import annotations

from unisono.tensor_parallel.groups import Partition
from unisono.world import World


class GroupWorlds:
    """Worlds of this rank's groups, each with a communicator of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: dict[Partition, World] = {}

    def of(self, partition: Partition) -> World:
        """Return the world of this rank's group; its ranks are in the group's order. Called by all ranks together."""
        if partition not in self._found:
            rank = self._world.rank
            color = next(number for number, group in enumerate(partition) if rank in group)
            self._found[partition] = self._world.split(color, partition[color].index(rank))
        return self._found[partition]

    def close(self) -> None:
        """Free the worlds."""
        while self._found:
            self._found.popitem()[1].free()
