"""Chooses a schedule by what it would cost on a network of which nothing was measured."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from unisono.network import Network, estimate
from unisono.placement import Placement
from unisono.schedules import find
from unisono.schedules.schedule import Algorithm

LIBRARY = "library"
IN_LEVELS = "hierarchical/library"
"""Within the nodes as ever, between them what MPI itself does."""

FEW = 64
"""Ranks up to which `direct`, which has p(p-1) messages a round, is thought of."""


class Choice(NamedTuple):
    """What carries out a collective: "library", or a schedule on a transport."""

    algorithm: str
    transport: str


def candidates(collective: str, placement: Placement) -> list[str]:
    """The schedules that are worth a trial for ranks that sit so, across nodes."""
    few = ["direct"] if placement.ranks <= FEW else []
    if collective == "broadcast":
        return ["tree", "pipeline"]
    if collective == "all_to_all":
        return ["direct"]
    if collective != "allreduce":
        return ["ring", *few]
    numberings = ["halving", "halving/round-robin"] if placement.supernodes else ["halving"]
    between = ["tree", *numberings, "ring", *few, "multicolor"]
    if placement.ranks == len(placement.nodes):
        return [*between, "pipeline"]
    inner = ["hierarchical" if name == "ring" else f"hierarchical/{name}" for name in between]
    return ["tree", "ring", *inner]


def choose_by_price(collective: str, placement: Placement, network: Network, nbytes: int) -> Choice:
    """The cheapest candidate for payloads of about that many bytes: sizes are rounded up to a power of two."""
    return Choice(_cheapest(collective, placement, network, 1 << max(2, (nbytes - 1).bit_length())), "messages")


@lru_cache(maxsize=4096)
def _cheapest(collective: str, placement: Placement, network: Network, nbytes: int) -> str:
    def seconds(name: str) -> float:
        algorithm: Algorithm = getattr(find(name, placement), collective)
        return float(estimate(algorithm, placement, network, nbytes))

    return min(candidates(collective, placement), key=seconds)
