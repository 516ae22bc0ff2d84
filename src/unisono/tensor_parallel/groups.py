"""Groups of ranks for a plan: model groups, which split layers, inside groups that share samples.

4 ranks; A is split over 2 ranks, B over 4                  4 ranks on nodes {0, 1} and {2, 3}; all layers over 2

    rank                0     1     2     3                     rank             0     1     2     3
    samples            └──── the same ─────┘                    samples         └─ s0 ─┘   └─ s1 ─┘
    A's groups         └ a0  a1 ┘ └ a0  a1 ┘                    groups          └ a0 a1 ┘  └ a0 a1 ┘
    B's group          └ b0  b1    b2  b3 ┘                     hold the same   {0, 2} and {1, 3}

Ranks of a model group train on the same samples, through the whole network: in PCL-DNN's hybrid (section 3.3) they do
in its split layers alone. With several group sizes, all ranks of their least common multiple do; a layer with a smaller
group is then computed by several groups alike. A group lies within a node where ranks allow: each node is filled with
whole groups, and the ranks that are left form groups across nodes, nodes of one switch first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from unisono.placement import Placement

Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ModelGroups:
    """Groups of all ranks of a world."""

    sharing: Partition
    """Ranks with the same samples, in groups of one size; their order is that of their shares of a batch."""

    @property
    def shared_by(self) -> int:
        """Number of ranks with the same samples."""
        return len(self.sharing[0])

    def model(self, size: int) -> Partition:
        """Return the model groups of `size` ranks; member k of a group holds part k of a layer."""
        return tuple(group[at : at + size] for group in self.sharing for at in range(0, len(group), size))

    def holders(self, size: int) -> Partition:
        """Return the ranks that hold the same part of layers in groups of `size`, for each part."""
        return tuple(tuple(sorted(group[part] for group in self.model(size))) for part in range(size))

    def data(self) -> Partition:
        """Return the ranks in groups of which each has every sample once: the k-th ranks of all that share samples."""
        return tuple(zip(*self.sharing, strict=True))


def model_groups(sizes: Sequence[int], placement: Placement) -> ModelGroups:
    """Return the groups for layers in model groups of these sizes, whose least common multiple divides the ranks.

    >>> from unisono.placement import regular
    >>> model_groups([2], regular(1, 2, 2)).holders(2)
    ((0, 2), (1, 3))
    """
    return ModelGroups(within_nodes(placement, lcm(*sizes)))


def within_nodes(placement: Placement, size: int) -> Partition:
    """Return all ranks in groups of `size`, ranks of one node together where they can be, by their first rank.

    >>> from unisono.placement import place
    >>> within_nodes(place(["a", "a", "a", "b", "b", "b"]), 2)
    ((0, 1), (2, 5), (3, 4))
    """
    found, left = list[tuple[int, ...]](), list[int]()
    for node in sorted(placement.nodes, key=lambda ranks: (placement.supernode_of(ranks[0]), ranks[0])):
        fit = len(node) - len(node) % size
        found += [node[at : at + size] for at in range(0, fit, size)]
        left += node[fit:]
    found += [tuple(left[at : at + size]) for at in range(0, len(left), size)]
    return tuple(sorted(found))
