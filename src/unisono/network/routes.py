"""Links that each message uses, as arrays.

number   0 ... n-1      n ... 2n-1     2n ... 2n+s-1     2n+s ... 2n+2s-1     2n+2s
link     out of nodes   into nodes     out of supernodes into supernodes      none: no limit
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.network.links import Network, Uneven
from unisono.network.traffic import Numbers, Seconds, Traffic
from unisono.placement import Placement


class Routes:
    """Links that each message uses. An extra link without a limit fills the rows of messages that use fewer."""

    def __init__(self, every: Traffic, placement: Placement, network: Network, uneven: Uneven) -> None:
        node = np.array(placement.node_of_rank)
        supernode = np.array(placement.supernodes or (0,) * len(placement.nodes))
        self.nodes, self.supernodes = len(placement.nodes), int(supernode.max()) + 1
        from_node, to_node = node[every.sender], node[every.receiver]
        self.within = from_node == to_node
        self.across = supernode[from_node] != supernode[to_node]
        rates = [1 / (float(network.beta) * factor) for factor in uneven.factors(placement)]
        self.unlimited = 2 * (self.nodes + self.supernodes)
        slow, level = np.unique(rates, return_inverse=True)
        # a number of each message, equal where its uplinks and the slower one of its nodes' links are
        self.kind = np.minimum(level[from_node], level[to_node])
        links, limits = [from_node, to_node + self.nodes], rates * 2
        if network.oversubscribed and self.across.any():
            out = 2 * self.nodes + supernode[from_node]
            into = 2 * self.nodes + self.supernodes + supernode[to_node]
            links += [np.where(self.across, link, self.unlimited) for link in (out, into)]
            self.kind += len(slow) * (1 + supernode[from_node] * self.supernodes + supernode[to_node]) * self.across
        limits += [1 / float(network.uplink_beta or 0) if network.oversubscribed else np.inf] * (2 * self.supernodes)
        ends, self.pair = np.unique(every.sender * every.ranks + every.receiver, return_inverse=True)
        self.pairs = len(ends)
        self.links = np.stack(links, axis=1)
        self.capacities = np.array([*limits, np.inf])
        self.from_supernode, self.to_supernode = supernode[from_node], supernode[to_node]

    def seconds(self, every: Traffic) -> Seconds:
        """Return the seconds that each link needs for all its bytes at its full rate."""
        loads: Seconds = np.zeros(len(self.capacities))
        for links in self.links[~self.within].T:
            loads += np.bincount(links, every.nbytes[~self.within], minlength=len(loads))
        loads *= every.pieces / self.capacities
        return loads

    def name(self, link: int) -> str:
        """Return the name of a link, such as "out of node 3"."""
        kinds = ("out of node", "into node", "out of supernode", "into supernode")
        counts = (self.nodes, self.nodes, self.supernodes, self.supernodes)
        for kind, count in zip(kinds, counts, strict=True):
            if link < count:
                return f"{kind} {link}"
            link -= count
        return "no link"

    def busiest(self, every: Traffic) -> tuple[float, float]:
        """Return the bytes over the busiest node link and over the busiest uplink."""

        def most(links: Numbers, some: NDArray[np.bool_]) -> float:
            return float(np.bincount(links[some], every.nbytes[some], minlength=1).max()) * every.pieces

        node = max(most(self.links[:, 0], ~self.within), most(self.links[:, 1], ~self.within))
        return node, max(most(self.from_supernode, self.across), most(self.to_supernode, self.across))
