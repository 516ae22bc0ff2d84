"""Least time of a collective: the bytes that must pass the links between nodes, whatever the schedule.

n bytes, N nodes of k ranks, p = N k. Each chunk has to be combined from N nodes, given to N nodes, or both:

    collective       bytes over all links out of nodes     4 ranks on 4 nodes, per link
    allreduce        2 (N-1) n                             3/2 n
    reduce_scatter     (N-1) n                             3/4 n
    all_gather         (N-1) n                             3/4 n
    broadcast          (N-1) n                             3/4 n, and n into each node but the root's: n
    all_to_all       N k (p-k) n / p                       3/4 n

All links together carry these bytes at best: bytes / sum of the rates. And no link is faster than the bytes that its
own node must send or receive. The same holds for supernodes and their uplinks. Latency, sums and transfers within nodes
are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.network.links import EVEN, Amount, Network, Uneven
from unisono.placement import Placement


def bound(collective: str, placement: Placement, network: Network, nbytes: Amount, uneven: Uneven = EVEN) -> float:
    """Return the least seconds of a collective on `nbytes` bytes of each rank; 0 on a single node."""
    node_betas = [float(network.beta) * factor for factor in uneven.factors(placement)]
    least = _least(collective, list(map(len, placement.nodes)), node_betas, float(nbytes))
    if not (placement.supernodes and network.oversubscribed):
        return least
    ranks = [0] * len(set(placement.supernodes))
    for supernode, node in zip(placement.supernodes, placement.nodes, strict=True):
        ranks[supernode] += len(node)
    return max(least, _least(collective, ranks, [float(network.uplink_beta or 0)] * len(ranks), float(nbytes)))


def _least(collective: str, ranks: Sequence[int], betas: Sequence[float], nbytes: float) -> float:
    """Return the least seconds for groups of ranks, each with a link of `betas` seconds per byte."""
    if len(ranks) == 1:
        return 0.0
    everyone, rates = sum(ranks), sum(1 / beta for beta in betas)
    if collective == "all_to_all":
        own = [mine * (everyone - mine) / everyone for mine in ranks]
        return nbytes * max(beta * share for beta, share in zip(betas, own, strict=True))
    if collective in ("reduce_scatter", "all_gather"):
        own = [max(mine, everyone - mine) / everyone for mine in ranks]
    else:
        own = [1.0] * len(ranks)
    times = 2 if collective == "allreduce" else 1
    together = times * (len(ranks) - 1) / rates
    return nbytes * max(together, *(beta * share for beta, share in zip(betas, own, strict=True)))
