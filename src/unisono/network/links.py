"""Speed of a cluster's links, as a value. The location of the ranks is in `placement.Placement`.

    rank ══ within ══ rank          node ──link──┐
     └────── node ─────┘            node ──link──┤ switch ──uplink── the other supernodes
                                    node ──link──┘ └─── supernode ──┘

Every link is full duplex: each direction carries 1/beta bytes per second independently. Nodes of one supernode share
only each other's links. Bytes that leave a supernode share its uplink; bytes that enter share the uplink's other
direction.
Source of the letters: Thakur, Rabenseifner and Gropp, 2005; swCaffe section 5.1.

Nodes and ranks may differ, in links that are slower than the network's and ranks that enter later:

    node 0   ══ beta ══════ switch      Uneven(slow_nodes={1: 4}, late_ranks={2: 0.005})
    node 1   ── 4 beta ──── switch      node 1 sends and receives at a quarter of the rate
    node 2   ══ beta ══════ switch      rank 2 begins its first round 5 ms after the others
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from unisono.errors import UsageError
from unisono.placement import Placement

MIN_BETA = 1e-30
"""Least seconds per byte of a link; what follows from less is no number."""

Amount = float | Fraction
"""Seconds or bytes. Fractions as arguments give fractions as results: no price is rounded in between."""


class NetworkError(UsageError):
    """Raised for a network or a payload that cannot be priced, and for a simulation that would be too large."""


@dataclass(frozen=True)
class Network:
    """Cost of a message: seconds per message, and seconds per byte."""

    alpha: Amount
    """Seconds before the first byte of a message between two nodes arrives."""
    beta: Amount
    """Seconds for which a byte occupies a node's own link, in each direction."""
    gamma: Amount = 0
    """Seconds that a rank needs to sum one byte into place."""
    uplink_beta: Amount | None = None
    """Seconds for which a byte occupies a supernode's uplink, in each direction; None or 0: uplinks have no limit."""
    within_alpha: Amount = 0
    """Seconds before the first byte of a message between two ranks of one node arrives."""
    within_beta: Amount = 0
    """Seconds per byte between two ranks of one node, independent of other pairs. 0: no time."""
    overhead: Amount = 0
    """Seconds that a rank is busy with each message sent or received (LogP's o); 0 in swCaffe's equations."""

    def __post_init__(self) -> None:
        """Raise NetworkError for values that no network can have."""
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < float("inf"):
                raise NetworkError(f"{name} is {value}; it must be 0 or more and finite")
        if self.beta < MIN_BETA:
            raise NetworkError(f"beta is {self.beta:g} seconds per byte; it must be {MIN_BETA:g} or more")

    @property
    def oversubscribed(self) -> bool:
        """True if uplinks have a limit."""
        return bool(self.uplink_beta)

    @property
    def measured(self) -> bool:
        """True if this network is known; DEFAULT stands for unknown networks."""
        return self != DEFAULT

    def crossing_beta(self, nodes: Amount) -> Amount:
        """Return the seconds per byte to another supernode while `nodes` nodes of the supernode share its uplink.

        For all its nodes, this is swCaffe's beta_2. Never below beta, because a byte passes its node's link as well.
        """
        return max(self.beta, (self.uplink_beta or 0) * nodes)


DEFAULT = Network(alpha=25e-6, beta=8e-10, gamma=2.5e-10, within_alpha=2e-6, within_beta=2e-10, overhead=4e-6)
"""Simple cluster on one 10 Gbit/s Ethernet switch; ranks of one node copy 5 GB/s and sum 4 GB/s."""


def shaped(
    rate_bits_per_second: float, hosts_per_supernode: int = 1, oversubscription: float = 0, alpha: float = 25e-6
) -> Network:
    """Return a network of hosts with links of `rate_bits_per_second` per direction, `hosts_per_supernode` per switch.

    `oversubscription` is the ratio of the total rate of a supernode's hosts to the rate of its uplink: 4 is
    TaihuLight's, 1 an uplink that carries all its hosts, 0 an uplink without a limit.

    >>> shaped(10e9, 256, 4).uplink_beta == 4 * 8e-10 / 256
    True
    """
    if rate_bits_per_second <= 0 or hosts_per_supernode < 1:
        raise NetworkError(f"{hosts_per_supernode} hosts at {rate_bits_per_second} bit/s; both must be positive")
    beta = 8 / rate_bits_per_second
    uplink_beta = oversubscription * beta / hosts_per_supernode if oversubscription else None
    return Network(alpha, beta, DEFAULT.gamma, uplink_beta, DEFAULT.within_alpha, DEFAULT.within_beta)


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
    for index in some:
        if not 0 <= index < count:
            raise NetworkError(f"there is no {kind} {index}: {kind}s are 0 to {count - 1}")
    return [float(some.get(index, otherwise)) for index in range(count)]
