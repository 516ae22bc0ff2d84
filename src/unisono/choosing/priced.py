"""Chooses a schedule where no table says which: by its cost on a network, and without traps on an unknown one."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from unisono.network import Network, estimate
from unisono.placement import Placement
from unisono.schedules import candidates, find
from unisono.schedules.numbering import deals_evenly
from unisono.schedules.schedule import Algorithm

LIBRARY = "library"
ROUND_ROBIN = "halving/round-robin"

RINGS = ("allreduce", "part_reduce", "part_broadcast")
"""Collectives that have a ring."""

LONG = 32 << 10
"""Bytes for each rank from which on a payload is long: a link of 10 Gbit/s then takes longer for a chunk than a message
takes to arrive, and the rounds of a ring cost less than what another schedule loses where uplinks are over-subscribed.
"""


ONE_LEADER = 64 << 10
"""Bytes of a column up to which one rank of a node speaks for all, where nothing was measured: prices count what one
rank does, and not that the ranks of a node may share its processor."""


class Choice(NamedTuple):
    """What carries out a collective: "library", or a schedule on a transport."""

    algorithm: str
    transport: str


def choose_by_price(collective: str, placement: Placement, network: Network, nbytes: int) -> Choice:
    """The cheapest candidate for payloads of about that many bytes: sizes are rounded up to a power of two.

    On a network of which nothing is known, long payloads are summed along a ring, which is good on any.
    """
    if not network.measured and nbytes >= LONG * placement.ranks and collective in RINGS:
        several = collective == "allreduce" and placement.ranks > len(placement.nodes)
        return Choice("hierarchical" if several else "ring", "messages")
    return Choice(_cheapest(collective, placement, network, 1 << max(2, (nbytes - 1).bit_length())), "messages")


def is_trap(algorithm: str, placement: Placement) -> bool:
    """Whether a schedule that may have served other ranks well is a bad choice for these, on any network."""
    levels, _, _ = algorithm.partition(ROUND_ROBIN)
    return algorithm.endswith(ROUND_ROBIN) and bool(placement.supernodes) and not deals_evenly(placement, bool(levels))


@lru_cache(maxsize=4096)
def _cheapest(collective: str, placement: Placement, network: Network, nbytes: int) -> str:
    def seconds(name: str) -> float:
        algorithm: Algorithm = getattr(find(name, placement), collective)
        return float(estimate(algorithm, placement, network, nbytes))

    columns = min(map(len, placement.nodes))
    other = "leader" if nbytes > ONE_LEADER * columns else "hierarchical"
    names = [name for name in candidates(collective, placement) if name.partition("/")[0] != other]
    return min(names, key=seconds)
