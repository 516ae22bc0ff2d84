"""Choice of a schedule without a table: by its predicted time, and a safe one on an unmeasured network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from unisono.network import Network, estimate
from unisono.network.estimate import LeastCost, least_cost
from unisono.placement import Placement
from unisono.schedules import candidates, find
from unisono.schedules.numbering import suits_round_robin

LIBRARY = "library"
ROUND_ROBIN = "halving/round-robin"

STEADY = {
    "allreduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "pipeline",
    "reduce": "pipeline",
}
"""Schedule of long payloads on an unmeasured network: each rank sends to one other, which is good on any network."""

LONG_BYTES_PER_RANK = 32 << 10
"""Bytes per rank from which a payload is long. A link of 10 Gbit/s then takes longer for a chunk than the latency of a
message, and the rounds of a ring cost less than another schedule loses on over-subscribed uplinks.
"""


MAX_LEADER_BYTES = 64 << 10
"""Largest column in bytes for which one rank of a node communicates for all, if no table decides. Prices count the work
of one rank; they do not count that the ranks of a node may share its processor."""


ROUNDING = 1e-9
"""Relative difference below which a least cost and an estimate are equal: sums of the same numbers in another order."""


class Choice(NamedTuple):
    """Choice for a collective: "library", or a schedule and its transport."""

    algorithm: str
    transport: str


def choose_by_price(collective: str, placement: Placement, network: Network, nbytes: int) -> Choice:
    """Return the cheapest candidate for payloads of `nbytes` bytes, rounded up to a power of two.

    On an unmeasured network, long payloads go by the schedule of STEADY.
    """
    if not network.measured and nbytes >= LONG_BYTES_PER_RANK * placement.ranks and collective in STEADY:
        several = collective == "allreduce" and placement.ranks > len(placement.nodes)
        return Choice("hierarchical" if several else STEADY[collective], "messages")
    return Choice(_find_cheapest(collective, placement, network, 1 << max(2, (nbytes - 1).bit_length())), "messages")


def is_unsuitable(algorithm: str, placement: Placement) -> bool:
    """Return True if a schedule is a bad choice for this placement on any network, even if it was good for another."""
    levels, _, _ = algorithm.partition(ROUND_ROBIN)
    return (
        algorithm.endswith(ROUND_ROBIN)
        and bool(placement.supernodes)
        and not suits_round_robin(placement, bool(levels))
    )


@lru_cache(maxsize=4096)
def _find_cheapest(collective: str, placement: Placement, network: Network, nbytes: int) -> str:
    """Return the name of the cheapest; of equals, the first. None is estimated whose least cost is above another
    schedule's estimate: that of a ring on thousands of ranks takes seconds."""
    columns = min(map(len, placement.nodes))
    other = "leader" if nbytes > MAX_LEADER_BYTES * columns else "hierarchical"
    costs = _least_costs(collective, placement, network)
    bounds = {name: cost.seconds(nbytes) for name, cost in costs.items() if name.partition("/")[0] != other}
    rank_of = {name: number for number, name in enumerate(bounds)}
    best = float("inf"), 0, ""
    for name in sorted(bounds, key=bounds.__getitem__):
        if bounds[name] <= best[0] * (1 + ROUNDING):
            seconds = estimate(getattr(find(name, placement), collective), placement, network, nbytes)
            best = min(best, (float(seconds), rank_of[name], name))
    return best[2]


@lru_cache(maxsize=64)
def _least_costs(collective: str, placement: Placement, network: Network) -> Mapping[str, LeastCost]:
    names = candidates(collective, placement)
    return {name: least_cost(getattr(find(name, placement), collective), placement, network) for name in names}
