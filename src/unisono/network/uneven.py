"""Differences between nodes and between ranks: links that are slower than the network's, ranks that enter later.

node 0   ══ beta ══════ switch      Uneven(slow_nodes={1: 4}, late_ranks={2: 0.005})
node 1   ── 4 beta ──── switch      node 1 sends and receives at a quarter of the rate
node 2   ══ beta ══════ switch      rank 2 begins its first round 5 ms after the others
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.network.links import NetworkError
from unisono.placement import Placement


@dataclass(frozen=True)
class Uneven:
    """Nodes whose links are slower, and ranks that enter later. All others are as the network describes them."""

    slow_nodes: Mapping[int, float] = field(default_factory=dict)
    """Factor of a node: a byte occupies its link, in each direction, this many times as long."""
    late_ranks: Mapping[int, float] = field(default_factory=dict)
    """Seconds after which a rank begins its first round."""

    def __post_init__(self) -> None:
        """Raise NetworkError for a factor or a time that cannot be."""
        for node, factor in self.slow_nodes.items():
            if not 1 <= factor < float("inf"):
                raise NetworkError(f"node {node}: its link is {factor:g} times slower; give 1 or more")
        for rank, seconds in self.late_ranks.items():
            if not 0 <= seconds < float("inf"):
                raise NetworkError(f"rank {rank} is {seconds:g} s late; give 0 or more")

    def factors(self, placement: Placement) -> list[float]:
        """Return the factor of each node's link. Raises NetworkError for a node that does not exist."""
        return _spread("node", self.slow_nodes, len(placement.nodes), 1.0)

    def starts(self, placement: Placement) -> list[float]:
        """Return the seconds after which each rank begins. Raises NetworkError for a rank that does not exist."""
        return _spread("rank", self.late_ranks, placement.ranks, 0.0)


EVEN = Uneven()
"""No differences."""


def _spread(kind: str, some: Mapping[int, float], count: int, otherwise: float) -> list[float]:
    for number in some:
        if not 0 <= number < count:
            raise NetworkError(f"there is no {kind} {number}: {kind}s are 0 to {count - 1}")
    return [float(some.get(number, otherwise)) for number in range(count)]
