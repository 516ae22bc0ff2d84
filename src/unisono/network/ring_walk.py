"""Time of a ring of very many ranks in one piece, in closed form: the longest walk over its links.

    rank   0 ══ e0 ══▶ 1 ══ e1 ══▶ 2 ══ e2 ══▶ 3 ══ e3 ══▶ 0       link e leads from rank e to rank e + 1

A round of rank r ends when its message over link r and the one over link r - 1 have arrived. So the end of round k is
the weight of the heaviest walk of k links that ends at r, if each link weighs as long as a message takes on it:

    eager messages   wait for the sender: a walk repeats link e, or takes e + 1 next
    longer ones      wait for both ends: it may also go back to e - 1

The heaviest walk repeats one link as long as it can, and then goes straight to r. Of links of equal weight it takes the
nearest. So p^2 messages become a few passes over p numbers.

Worked example: 4 ranks, links of 1 s but e1 of 3 s, eager, 6 rounds. Rank 1 repeats e1: 18 s. Rank 2: 6 times e1 as
well, as it waits for its last message. Rank 3: 5 times e1, then e2: 16 s. Rank 0: 4 times e1, then e2 and e3: 14 s.

All sums are equal, and added behind. It needs one piece, one lane, and no link that two hops of the ring share.
"""

from __future__ import annotations

import numpy as np

from unisono.network.critical_path import Cause, Delay
from unisono.network.links import Network, NetworkError
from unisono.network.play import EXACT_RESOLUTION
from unisono.network.simulate import Simulated
from unisono.network.traffic import ELEMENT_BYTES, Numbers, Seconds
from unisono.network.uneven import EVEN, Uneven
from unisono.placement import Placement
from unisono.schedules.numbering import locality_order


def ring_ends(weights: Seconds, rounds: int, eager: bool) -> tuple[Seconds, Numbers]:
    """Return the seconds after which each rank ends round `rounds` - 1, and the link that it waits for longest.

    `weights` has the seconds of a message on each link; there are at least as many rounds as links, less one.
    """
    best, longest = _from_behind(weights, rounds, eager)
    if eager:
        return best, longest
    # seen from the other side of the ring, link e leads from rank e + 1 to rank e
    back, of_back = _from_behind(np.roll(weights[::-1], -1), rounds, eager)
    back, of_back = back[::-1], (len(weights) - 2 - of_back[::-1]) % len(weights)
    ahead = back > best
    return np.where(ahead, back, best), np.where(ahead, of_back, longest)


def _from_behind(weights: Seconds, rounds: int, eager: bool) -> tuple[Seconds, Numbers]:
    """Return the same for walks that go on to the rank from a link behind it, or from its own link if `eager`."""
    ranks = len(weights)
    twice = np.concatenate([weights, weights])
    passed = np.concatenate([[0.0], np.cumsum(twice)])  # seconds of all links before each
    rank = np.arange(ranks, 2 * ranks)
    best, longest = np.zeros(ranks), np.zeros(ranks, np.int64)
    for weight in np.unique(weights):
        last = np.maximum.accumulate(np.where(twice == weight, np.arange(2 * ranks), -1))
        link = last[rank if eager else rank - 1]
        first = link if eager else link + 1  # first link of the way to the rank
        seconds = (rounds - (rank - first)) * weight + passed[rank] - passed[first]
        longer = seconds > best
        best, longest = np.where(longer, seconds, best), np.where(longer, link % ranks, longest)
    return best, longest


def simulate_ring(
    placement: Placement, network: Network, nbytes: int, eager: int = 1 << 16, uneven: Uneven = EVEN
) -> Simulated:
    """Return what `simulate` gives for an allreduce along `ring` in one piece.

    Raises NetworkError for fewer elements than ranks, for late ranks, and for nodes of `uneven` that do not exist.
    """
    ranks = placement.ranks
    if uneven.late_ranks:
        raise NetworkError(f"a ring of {ranks:,} ranks is simulated without late ranks: leave them out")
    if nbytes < ranks * ELEMENT_BYTES:
        raise NetworkError(f"{nbytes:,} bytes are less than an element for each of the {ranks:,} ranks of a ring")
    order = np.array(locality_order(placement))
    node = np.array(placement.node_of_rank)[order]
    supernode = np.array(placement.supernodes or (0,) * len(placement.nodes))[node]
    after, factors = np.roll(node, -1), np.array(uneven.factors(placement))
    chunk, rounds = nbytes / ranks, 2 * (ranks - 1)
    betas = float(network.beta) * np.maximum(factors[node], factors[after])
    crossing = supernode != np.roll(supernode, -1)
    betas = np.where(crossing, np.maximum(betas, float(network.uplink_beta or 0)), betas)
    within = node == after
    alphas = np.where(within, float(network.within_alpha), float(network.alpha))
    weights = alphas + chunk * np.where(within, float(network.within_beta), betas)
    ends, _ = ring_ends(weights, rounds, chunk <= eager)
    sums = rounds * (chunk * float(network.gamma) / 2 + 2 * float(network.overhead))
    slowest = int(weights.argmax())  # its own rank repeats it in all rounds, and no rank ends later
    latency = 0.0 if within[slowest] else rounds * float(alphas[slowest])
    side = f"into node {after[slowest]}" if factors[after[slowest]] > factors[node[slowest]] else None
    place = "" if within[slowest] else side or f"out of node {node[slowest]}"
    causes = [
        Delay(Cause.LATENCY, "", latency),
        Delay(Cause.WITHIN if within[slowest] else Cause.LINK, place, rounds * float(weights[slowest]) - latency),
        Delay(Cause.SUMS, "", sums),
    ]
    of_rank = np.empty(ranks)
    of_rank[order] = ends + sums
    per_link = rounds * chunk
    return Simulated(
        float(of_rank.max()),
        rounds * ranks,
        0.0 if within.all() else per_link,
        per_link if crossing.any() else 0.0,
        1,
        EXACT_RESOLUTION,
        tuple(of_rank.tolist()),
        tuple(sorted((one for one in causes if one.seconds > 0), key=lambda one: -one.seconds)),
    )
