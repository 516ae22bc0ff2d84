"""Placement of the ranks: the ranks of each node and the nodes of each supernode, as a value.

4 ranks on 2 nodes, as launchers usually place them:

    node 0: ranks 0 1        Placement(nodes=((0, 1), (2, 3)))
    node 1: ranks 2 3
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Partition = tuple[tuple[int, ...], ...]
"""All ranks of a world, in groups."""


@dataclass(frozen=True)
class Placement:
    """Ranks of every node. Nodes are in the order of their lowest rank, the ranks of a node in ascending order."""

    nodes: tuple[tuple[int, ...], ...]
    supernodes: tuple[int, ...] = ()
    """Number of the supernode of each node (the switch to which it is connected); empty: all are on one."""

    @cached_property
    def ranks(self) -> int:
        return sum(len(node) for node in self.nodes)

    @property
    def one_node(self) -> bool:
        """True if all ranks share memory."""
        return len(self.nodes) == 1

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """Number of the node of each rank."""
        nodes_of_ranks = {rank: index for index, node in enumerate(self.nodes) for rank in node}
        return tuple(nodes_of_ranks[rank] for rank in range(self.ranks))

    def node_of(self, rank: int) -> int:
        return self.node_of_rank[rank]

    def supernode_of(self, rank: int) -> int:
        return self.supernodes[self.node_of_rank[rank]] if self.supernodes else 0


def place(node_of_rank: Sequence[Hashable], supernode_of_rank: Sequence[Hashable] = ()) -> Placement:
    """Return the placement of ranks 0, 1, ..., given the name (any hashable value) of each one's node and supernode.

    Supernodes are numbered in the order of their lowest rank. Without them all nodes are on one switch.

    >>> place(["a", "b", "a"])
    Placement(nodes=((0, 2), (1,)), supernodes=())
    >>> place(["a", "b", "c"], ["x", "y", "x"])
    Placement(nodes=((0,), (1,), (2,)), supernodes=(0, 1, 0))
    """
    nodes: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(node_of_rank):
        nodes.setdefault(name, []).append(rank)
    numbers: dict[Hashable, int] = {}
    for name in supernode_of_rank:
        numbers.setdefault(name, len(numbers))
    supernodes = tuple(numbers[supernode_of_rank[ranks[0]]] for ranks in nodes.values()) if len(numbers) > 1 else ()
    return Placement(tuple(tuple(ranks) for ranks in nodes.values()), supernodes)


def regular(supernodes: int, nodes: int, ranks: int) -> Placement:
    """Return `supernodes` supernodes of `nodes` nodes of `ranks` ranks each, numbered one after another.

    >>> regular(2, 1, 2)
    Placement(nodes=((0, 1), (2, 3)), supernodes=(0, 1))
    """
    everywhere = range(supernodes * nodes * ranks)
    return place([rank // ranks for rank in everywhere], [rank // (ranks * nodes) for rank in everywhere])


def one_rank_per_node(ranks: int) -> Placement:
    """Return the placement of every rank on a node of its own, with all nodes on one switch."""
    return regular(1, ranks, 1)


@lru_cache(64)
def model_groups(placement: Placement, size: int) -> Partition:
    """Return all ranks in groups of `size`, over which layers are split: ranks of one node together where they can be.

    Each node is filled with whole groups; the ranks that are left form groups across nodes, nodes of one switch first.
    Member k of a group holds part k. Groups are in the order of their first ranks.

        4 ranks                          groups of 2             nodes {0, 1} and {2, 3}, groups of 2
        rank                             0     1     2     3     0     1     2     3
        part                             └ a0  a1 ┘ └ a0  a1 ┘   └ a0 a1 ┘   └ a0 a1 ┘    {0, 2}, {1, 3} hold the same

    >>> model_groups(place(["a", "a", "a", "b", "b", "b"]), 2)
    ((0, 1), (2, 5), (3, 4))
    """
    groups, left = list[tuple[int, ...]](), list[int]()
    for node in sorted(placement.nodes, key=lambda ranks: (placement.supernode_of(ranks[0]), ranks[0])):
        fit = len(node) - len(node) % size
        groups += [node[first : first + size] for first in range(0, fit, size)]
        left += node[fit:]
    groups += [tuple(left[first : first + size]) for first in range(0, len(left), size)]
    return tuple(sorted(groups))


def holders_of(groups: Partition) -> Partition:
    """Return the ranks that hold the same part of what the ranks of each group share, for each part, ascending.

    >>> holders_of(((0, 1), (2, 3)))
    ((0, 2), (1, 3))
    """
    return tuple(tuple(sorted(ranks)) for ranks in zip(*groups, strict=True))
