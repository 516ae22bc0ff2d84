"""What a cluster's links cost, as a value: who sits where is `placement.Placement`, what passing costs is here.

    rank ══ within ══ rank          node ──link──┐
     └────── node ─────┘            node ──link──┤ switch ──uplink── the other supernodes
                                    node ──link──┘ └─── supernode ──┘

Every link is full duplex: each direction carries 1/beta bytes a second by itself. Nodes of one supernode meet only at
each other's links; what leaves a supernode shares its uplink, what enters shares the uplink's other direction.
Source of the letters: Thakur, Rabenseifner and Gropp, 2005; swCaffe section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from unisono.errors import UsageError

Amount = float | Fraction
"""Seconds or bytes. Fractions in, fractions out: nothing that is priced is rounded on the way."""


class NetworkError(UsageError):
    """A network or a payload that cannot be priced, or a simulation that would be too large."""


@dataclass(frozen=True)
class Network:
    """What a message costs: seconds each, and seconds a byte."""

    alpha: Amount
    """Seconds a message between two nodes takes before its first byte arrives."""
    beta: Amount
    """Seconds a byte occupies a node's own link, in each direction."""
    gamma: Amount = 0
    """Seconds a rank needs to sum one byte into place."""
    uplink_beta: Amount | None = None
    """Seconds a byte occupies a supernode's uplink, in each direction; None or 0: the uplinks never hold anyone up."""
    within_alpha: Amount = 0
    """Seconds a message between two ranks of one node takes before its first byte arrives."""
    within_beta: Amount = 0
    """Seconds a byte takes between two ranks of one node; pairs do not hold each other up. 0: no time."""
    overhead: Amount = 0
    """Seconds that a rank is busy with each message that it sends or takes (LogP's o); 0 in swCaffe's equations."""

    def __post_init__(self) -> None:
        """Refuse what no network can be."""
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < float("inf"):
                raise NetworkError(f"{name} is {value}; it has to be 0 or more")
        if not self.beta:
            raise NetworkError("beta is 0; a link needs some time for a byte")

    @property
    def oversubscribed(self) -> bool:
        """Whether uplinks have a limit at all."""
        return bool(self.uplink_beta)

    @property
    def measured(self) -> bool:
        """Whether anything is known of this network; DEFAULT stands for those of which nothing is."""
        return self != DEFAULT

    def crossing_beta(self, nodes: int) -> Amount:
        """Seconds a byte to another supernode takes while `nodes` nodes of the supernode share its uplink.

        swCaffe's beta_2 where `nodes` are all of them; never below beta, for a byte passes its node's link as well.
        """
        return max(self.beta, (self.uplink_beta or 0) * nodes)


DEFAULT = Network(alpha=25e-6, beta=8e-10, gamma=2.5e-10, within_alpha=2e-6, within_beta=2e-10, overhead=4e-6)
"""A plain cluster on one 10 Gbit/s Ethernet switch; ranks of one node pass 5 GB/s and sum 4 GB/s."""


def shaped(
    rate_bits_per_second: float,
    hosts_per_supernode: int = 1,
    oversubscription: float = 0,
    alpha: float = 25e-6,
    gamma: float = 2.5e-10,
    within_alpha: float = 2e-6,
    within_beta: float = 2e-10,
) -> Network:
    """The network of hosts with links of `rate_bits_per_second`, each way, on switches of `hosts_per_supernode` hosts.

    `oversubscription` is how often the rates of a supernode's hosts together exceed that of its uplink: 4 is
    TaihuLight's, 1 an uplink that carries all its hosts, 0 none that ever holds anyone up.

    >>> shaped(10e9, 256, 4).uplink_beta == 4 * 8e-10 / 256
    True
    """
    if rate_bits_per_second <= 0 or hosts_per_supernode < 1:
        raise NetworkError(f"{hosts_per_supernode} hosts at {rate_bits_per_second} bits a second are no network")
    beta = 8 / rate_bits_per_second
    uplink_beta = oversubscription * beta / hosts_per_supernode if oversubscription else None
    return Network(alpha, beta, gamma, uplink_beta, within_alpha, within_beta)
