"""Finds the nodes that share a switch, from the speed of pairs of nodes while all others are busy too.

A pair alone may be as fast through an uplink as inside a supernode; an uplink shows only under load. So in each
round all nodes are paired anew, and all pairs exchange at once:

    round 0   0-5  1-3  2-7  4-6      pairs that cross share the uplinks and are slow: 0-5, 2-7
    round 1   0-2  1-6  3-4  5-7                                                       1-6, 3-4
    ...                               a pair that was often slow sits in two supernodes

Uplinks over-subscribed by less than three may go unnoticed: only half of the pairs cross, a load that they can carry.
Nodes are then joined, the surest first, as long as the pairs between two groups were rarely slow.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Pair = tuple[int, int]
Matrix = NDArray[np.float64]

SLOW_FRACTION = 0.75
"""Fraction of the speed inside a supernode below which a pair counts as slow."""

SLOW_LINK_RATIO = 1.5
"""Ratio of the median speed of nodes to that of a node from which its link counts as slow."""

MAX_SLOW_SHARE = 0.2
"""Largest share of slow exchanges of pairs inside one supernode."""


def pairings(nodes: int, rounds: int, seed: int = 0) -> list[list[Pair]]:
    """Return `rounds` random pairings of `nodes` nodes, the same for the same seed; an odd number leaves one node out.

    In every `nodes - 1` rounds (one more where `nodes` is odd) each two nodes are paired once, in a new random order.
    """
    rng = random.Random(seed)
    found: list[list[Pair]] = []
    while len(found) < rounds and nodes > 1:
        order: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
        rng.shuffle(order)
        for _ in range(len(order) - 1):  # the circle method: one stays, the others go round
            half = len(order) // 2
            exchanges = zip(order[:half], reversed(order[half:]), strict=True)
            found.append([(min(a, b), max(a, b)) for a, b in exchanges if a is not None and b is not None])
            order = [order[0], order[-1], *order[1:-1]]
    return found[:rounds]


def supernodes(nodes: int, speeds: Iterable[tuple[Pair, float]]) -> tuple[int, ...]:
    """Return the number of each node's supernode, given the speed (any unit) of each exchange of each pair.

    Supernodes are numbered in the order of their lowest node; there is one where no pairs stand out as slow. Average
    linkage over the share of slow exchanges; costs O(nodes^3) in NumPy.
    """
    exchanges, slow = _count_exchanges(nodes, list(speeds))
    alive = list(range(nodes))
    groups = {node: [node] for node in alive}
    while len(alive) > 1:
        share = np.where(exchanges > 0, slow / np.maximum(exchanges, 1), 1.0)[np.ix_(alive, alive)]
        np.fill_diagonal(share, np.inf)
        one, other = sorted(alive[index] for index in np.unravel_index(np.argmin(share), share.shape))
        if share.min() >= MAX_SLOW_SHARE:
            break
        for matrix in (exchanges, slow):
            matrix[one] += matrix[other]
            matrix[:, one] += matrix[:, other]
        groups[one] += groups.pop(other)
        alive.remove(other)
    numbers = {
        node: number
        for number, first in enumerate(sorted(groups, key=lambda first: min(groups[first])))
        for node in groups[first]
    }
    return tuple(numbers[node] for node in range(nodes))


def _count_exchanges(nodes: int, speeds: Sequence[tuple[Pair, float]]) -> tuple[Matrix, Matrix]:
    """Return the number of exchanges of each pair of nodes, and of slow ones, as symmetric (nodes, nodes) matrices."""
    exchanges, slow = np.zeros((nodes, nodes)), np.zeros((nodes, nodes))
    if speeds:
        full = _full_speed(nodes, speeds)
        for (a, b), speed in speeds:
            for index in ((a, b), (b, a)):
                exchanges[index] += 1
                slow[index] += speed < SLOW_FRACTION * full
    return exchanges, slow


def _full_speed(nodes: int, speeds: Sequence[tuple[Pair, float]]) -> float:
    """Return the speed inside a supernode: that of the fastest pairs, enough of them to hold each node once or more."""
    seen: dict[Pair, list[float]] = {}
    for pair, speed in speeds:
        seen.setdefault(pair, []).append(speed)
    medians = sorted((sorted(found)[len(found) // 2] for found in seen.values()), reverse=True)
    return medians[min(len(medians) - 1, nodes // 4)]


def slow_links(nodes: int, speeds: Iterable[tuple[Pair, float]]) -> dict[int, float]:
    """Return, for each node whose link is slow, how many times it is slower, given the speed of each exchange of pairs.

    A node's own speed is that of its fastest pair, by the median of the pair's exchanges: behind a narrow uplink the
    pairs inside its supernode are still fast, but no pair of a slow link is. It is slow from SLOW_LINK_RATIO times
    below the median of all nodes on. With two nodes, both have the same pair, and none is slow.

    Worked example: pairs 0-1, 0-2 and 1-2 at 100 MB/s, those of node 3 at 25: fastest 100, 100, 100, 25; {3: 4.0}.
    """
    found: dict[Pair, list[float]] = {}
    for pair, speed in speeds:
        found.setdefault(pair, []).append(speed)
    medians = {pair: statistics.median(seen) for pair, seen in found.items()}
    fastest = {
        node: max(speed for pair, speed in medians.items() if node in pair)
        for node in range(nodes)
        if any(node in pair for pair in medians)
    }
    if not fastest:
        return {}
    typical = statistics.median(fastest.values())
    return {node: typical / speed for node, speed in fastest.items() if typical >= SLOW_LINK_RATIO * speed}
