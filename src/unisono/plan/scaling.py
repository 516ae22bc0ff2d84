"""Speedup of a network on many nodes: weak scaling by shares (swCaffe 6.3), epochs, and how far nodes pay.

Weak scaling keeps the samples of a node, so computing stays, and the exchange after it is added:

    step = computing + exchange       speedup = N computing / step = N (1 - share of the exchange)

Worked example: 1,024 nodes, 30.13% of the step in communication: 1,024 * 0.6987 = 715 (swCaffe's figures 10 and 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil


def weak_speedup(nodes: int, computing: float, exchange: float) -> float:
    """Return the speedup of N nodes whose step has an exchange, in seconds, after its computing.

    >>> weak_speedup(4, computing=3.0, exchange=1.0)
    3.0
    """
    return nodes * computing / (computing + exchange)


def epoch_seconds(samples: int, minibatch: int, step_seconds: float) -> float:
    """Return the seconds of an epoch: a last smaller minibatch takes a step as well.

    >>> epoch_seconds(1000, 256, 0.5)
    2.0
    """
    return ceil(samples / minibatch) * step_seconds


def last_worthwhile(speedups: Sequence[tuple[int, float]], least: float = 0.5) -> int:
    """Return the last number of nodes, of (nodes, speedup) in rising order, up to which each further node has added at
    least `least` to the speedup: marginal efficiency, the difference of speedups over that of nodes.

    >>> last_worthwhile([(1, 1.0), (2, 1.9), (4, 3.2), (8, 3.6)])
    4
    """
    last = speedups[0][0]
    for (fewer, before), (nodes, speedup) in pairwise(speedups):
        if speedup - before < least * (nodes - fewer):
            break
        last = nodes
    return last
