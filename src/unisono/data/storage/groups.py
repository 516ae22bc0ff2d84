"""Groups of ranks, each of which holds a copy of a pack: ranks under one switch, if the numbers divide.

Samples move inside a group only. So a group under one switch sends nothing through an uplink, and a group on one node
nothing at all. 8 ranks on 4 nodes of 2 supernodes, in 2 groups:

    rank                            0  1 | 2  3 | 4  5 | 6  7     2 ranks a node
    supernode                       0  0 | 1  1 | 0  0 | 1  1     nodes are connected by turns
    group                           0  0   1  1   0  0   1  1     by number of rank: 0 0 0 0 1 1 1 1

Ranks are taken supernode by supernode, node by node. Members with the same number in their groups hold the same
samples (`ownership.py`). Supernodes whose ranks do not divide into groups leave the groups to the numbers of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import ShuffleOptions
from unisono.placement import Placement


@dataclass(frozen=True)
class Groups:
    """Groups of ranks of one size."""

    group_of_rank: tuple[int, ...]
    member_of_rank: tuple[int, ...]
    """Number of each rank in its group: ranks of a group in ascending order."""
    note: str = ""
    """Line about groups that reach over supernodes though several are known; empty if there are none."""


def form_groups(placement: Placement, groups: int) -> Groups:
    """Return `groups` groups, which divide the ranks: under one switch where its ranks divide, else by number of rank.

    >>> from unisono.placement import place
    >>> form_groups(place(range(4), [0, 1, 0, 1]), 2)
    Groups(group_of_rank=(0, 1, 0, 1), member_of_rank=(0, 0, 1, 1), note='')
    """
    members = placement.ranks // groups
    by_place = sorted(range(placement.ranks), key=lambda rank: (placement.supernode_of(rank), placement.node_of(rank)))
    sizes = _ranks_of_supernodes(placement)
    divided = not any(size % members for size in sizes)
    ordered = by_place if divided else list(range(placement.ranks))
    found = np.empty(placement.ranks, np.int64)
    found[ordered] = np.arange(placement.ranks) // members
    note = (
        ""
        if divided or groups == 1
        else f"groups of {members} ranks are formed by number of rank: supernodes of {sizes} ranks do not divide"
    )
    return Groups(tuple(found.tolist()), tuple(_numbers_within(found).tolist()), note)


def scope_note(shuffle: ShuffleOptions, placement: Placement) -> str:
    """Return a line about samples that leave their part's ranks or cross supernodes in each epoch; empty if none do.

    Part q of P belongs to ranks q p / P to (q + 1) p / P - 1 (`data/order.py`).
    """
    ranks, parts = placement.ranks, shuffle.parts
    if not parts or parts % ranks == 0:
        return ""
    if ranks % parts:
        return f"{ranks} ranks do not divide into {parts} parts, so samples between two parts move in each epoch"
    members = ranks // parts
    for first in range(0, ranks, members):
        sites = {placement.supernode_of(rank) for rank in range(first, first + members)}
        if len(sites) > 1:
            return (
                f"ranks {first} to {first + members - 1} share a part, but are in {len(sites)} supernodes, so samples "
                "cross uplinks in each epoch: number ranks supernode by supernode, or set more parts"
            )
    return ""


def _ranks_of_supernodes(placement: Placement) -> list[int]:
    numbers = [placement.supernode_of(rank) for rank in range(placement.ranks)]
    return [numbers.count(number) for number in sorted(set(numbers))]


def _numbers_within(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of each rank among the ranks of its group, in ascending order."""
    by_group = np.argsort(groups, kind="stable")
    numbers = np.empty_like(groups)
    numbers[by_group] = np.arange(len(groups)) % np.bincount(groups)[0]
    return numbers
