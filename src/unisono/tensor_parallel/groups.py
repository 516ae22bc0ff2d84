"""Model groups: the ranks over which a layer is split, for each size of groups by itself.

4 ranks; A is split over 2 ranks, B over 4                  4 ranks on nodes {0, 1} and {2, 3}; a layer over 2

    rank                0     1     2     3                     rank             0     1     2     3
    A's groups         └ a0  a1 ┘ └ a0  a1 ┘                    groups          └ a0 a1 ┘  └ a0 a1 ┘
    B's group          └ b0  b1    b2  b3 ┘                     hold the same   {0, 2} and {1, 3}

A group lies within a node where ranks allow: each node is filled with whole groups, and the ranks that are left form
groups across nodes, nodes of one switch first.
"""

from __future__ import annotations

from unisono.placement import Placement
from unisono.reducer.parameter_parts import Partition
from unisono.world import World


def model_groups(placement: Placement, size: int) -> Partition:
    """Return all ranks in groups of `size`, ranks of one node together where they can be, by their first rank. Member k
    of a group holds part k.

    >>> from unisono.placement import place
    >>> model_groups(place(["a", "a", "a", "b", "b", "b"]), 2)
    ((0, 1), (2, 5), (3, 4))
    """
    found, left = list[tuple[int, ...]](), list[int]()
    for node in sorted(placement.nodes, key=lambda ranks: (placement.supernode_of(ranks[0]), ranks[0])):
        fit = len(node) - len(node) % size
        found += [node[at : at + size] for at in range(0, fit, size)]
        left += node[fit:]
    found += [tuple(left[at : at + size]) for at in range(0, len(left), size)]
    return tuple(sorted(found))


class GroupWorlds:
    """Worlds of this rank's groups, each with a communicator of its own: a resource of the world of all."""

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
