"""Time of recursive halving and doubling over supernodes: swCaffe section 5.1, equations 2 to 6.

p nodes in supernodes of q; a byte takes beta_1 within a supernode, and beta_2 to another while all its nodes send. The
longest messages go first in the reduce-scatter, and last in the all-gather:

    p = 8, q = 4      message       n/2     n/4     n/8        reduce-scatter, in bytes
    in rank order     goes to       other   own     own        the longest cross:   (p - q) beta_2 n / p
    round robin       goes to       own     own     other      the shortest cross:  (p / q - 1) beta_2 n / p

    in rank order   t = log2(p) alpha + (q - 1) beta_1 n / p + (p - q) beta_2 n / p
    round robin     t = log2(p) alpha + (p - p / q) beta_1 n / p + (p / q - 1) beta_2 n / p
    allreduce         = 2 t + (p - 1) / p n gamma                  the reduce-scatter sums as well

Worked example: 232.6 MiB of AlexNet on 1,024 nodes of TaihuLight, q = 256, beta_1 = 1 / (12 GB/s), beta_2 = 4 beta_1,
as uplinks carry a quarter: 132 ms in rank order, 41 ms round robin, each without alpha and gamma.

The section prints beta_2 as a quarter of beta_1; a quarter of the bandwidth is four times the time. `network/price.py`
prices any schedule and any p; for powers of two it gives the same.

Weak scaling (6.3) keeps the samples of a node, so computing stays, and the exchange after it is added:

    step = computing + exchange       speedup = N computing / step = N (1 - share of the exchange)

Worked example: 1,024 nodes, 30.13% of the step in communication: 1,024 * 0.6987 = 715 (swCaffe's figures 10 and 11).
"""

from __future__ import annotations

from unisono.network import Amount, Network, NetworkError


def rank_order_seconds(nodes: int, supernode: int, nbytes: Amount, network: Network) -> Amount:
    """Return the seconds of an allreduce whose ranks are numbered supernode by supernode (equations 2 to 4)."""
    return _allreduce(nodes, supernode, nbytes, network, supernode - 1, nodes - supernode)


def round_robin_seconds(nodes: int, supernode: int, nbytes: Amount, network: Network) -> Amount:
    """Return the seconds of an allreduce whose ranks are dealt to the supernodes in turn (equations 5 and 6)."""
    supernodes = nodes // supernode
    return _allreduce(nodes, supernode, nbytes, network, nodes - supernodes, supernodes - 1)


def weak_speedup(nodes: int, computing: float, exchange: float) -> float:
    """Return the speedup of N nodes whose step has an exchange, in seconds, after its computing.

    >>> weak_speedup(4, computing=3.0, exchange=1.0)
    3.0
    """
    return nodes * computing / (computing + exchange)


def _allreduce(nodes: int, supernode: int, nbytes: Amount, network: Network, within: int, crossing: int) -> Amount:
    """Return the seconds with these shares of n / p bytes within a supernode and to another.

    Raises NetworkError for numbers of nodes that the equations do not cover.
    """
    for name, count in (("nodes", nodes), ("nodes in a supernode", supernode)):
        if count < 1 or count & (count - 1):
            raise NetworkError(f"{count} {name}: swCaffe's equations need a power of two; `price` takes any number")
    if supernode > nodes:
        raise NetworkError(f"{nodes} nodes cannot fill a supernode of {supernode}; give {nodes} or fewer")
    share = nbytes / nodes
    beta_1, beta_2 = network.beta, network.crossing_beta(supernode)
    half = (nodes.bit_length() - 1) * network.alpha + (within * beta_1 + crossing * beta_2) * share
    return 2 * half + (nodes - 1) * share * network.gamma
