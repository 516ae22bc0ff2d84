"""Who sits where: the ranks of each node, as a value.

4 ranks on 2 nodes, as launchers usually place them:

    node 0: ranks 0 1        Placement(nodes=((0, 1), (2, 3)))
    node 1: ranks 2 3
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The ranks of every node. Nodes come in the order of their lowest rank, ranks within a node in theirs."""

    nodes: tuple[tuple[int, ...], ...]
    supernodes: tuple[int, ...] = ()
    """For each node the number of its supernode (the switch it hangs on); empty: all on one."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(len(node) for node in self.nodes)

    @property
    def one_node(self) -> bool:
        """Whether all ranks share memory."""
        return len(self.nodes) == 1

    def node_of(self, rank: int) -> int:
        """The number of the node that `rank` sits on."""
        return next(number for number, node in enumerate(self.nodes) if rank in node)

    def supernode_of(self, rank: int) -> int:
        """The number of the supernode that `rank` sits in."""
        return self.supernodes[self.node_of(rank)] if self.supernodes else 0


def place(node_of_rank: Sequence[Hashable]) -> Placement:
    """The placement of ranks 0, 1, ..., given for each the name of its node (any hashable value).

    >>> place(["a", "b", "a"])
    Placement(nodes=((0, 2), (1,)), supernodes=())
    """
    nodes: dict[Hashable, list[int]] = {}
    for rank, name in enumerate(node_of_rank):
        nodes.setdefault(name, []).append(rank)
    return Placement(tuple(tuple(ranks) for ranks in nodes.values()))
