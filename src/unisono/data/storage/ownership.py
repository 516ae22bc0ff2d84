"""Ownership: the rank that holds each sample, the same on every rank.

When a pack is read, each rank takes a stretch of it, so that it reads few stripes: as in an epoch of one step, in the
order of the pack. In an epoch a rank holds the samples that it will see in that epoch. They depend on the order alone
(`data/order.py`): 10 samples, batches of 4, 2 ranks

    read            rank 0: 0 1 2 3 4         rank 1: 5 6 7 8 9
    epoch's order   7 2 9 4 | 0 5 1 8 | 3 6
    held            rank 0: 7 2  0 5  3       rank 1: 9 4  1 8  6

So a shuffle is a true permutation, it is the same for any number of ranks, and no rank ever needs a sample of another.
Each of several groups of ranks may hold a copy: ranks under one switch, if the numbers divide. Samples move inside a
group only. So a group under one switch sends nothing through an uplink, and a group on one node nothing at all. 8 ranks
on 4 nodes of 2 supernodes, in 2 groups:

    rank                            0  1 | 2  3 | 4  5 | 6  7     2 ranks a node
    supernode                       0  0 | 1  1 | 0  0 | 1  1     nodes are connected by turns
    group                           0  0   1  1   0  0   1  1     by number of rank: 0 0 0 0 1 1 1 1

Ranks are taken supernode by supernode, node by node. Members with the same number in their groups hold the same
samples. Supernodes whose ranks do not divide into groups leave the groups to the numbers of the ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Numbers, ShuffleOptions, ranks_of
from unisono.errors import PackError
from unisono.placement import Placement

Owners = NDArray[np.integer]
"""Member of a group that holds each sample: its owner."""


def owners_in_epoch(order: Numbers, batch: int, member_of_rank: NDArray[np.integer]) -> Owners:
    """Return the owners in an epoch with this order, in the smallest dtype, since the access is random.

    `member_of_rank` has the number of each rank in its group.
    """
    members = member_of_rank.astype(np.min_scalar_type(int(member_of_rank.max())))
    held = np.empty(len(order), members.dtype)
    held[order] = members[ranks_of(len(order), batch, len(members))]
    return held


class Groups(NamedTuple):
    """Groups of ranks of one size."""

    group_of_rank: tuple[int, ...]
    member_of_rank: tuple[int, ...]
    """Number of each rank in its group: ranks of a group in ascending order."""
    note: str = ""
    """Line about groups that reach over supernodes though several are known; empty if there are none."""


def check_groups(samples: int, ranks: int, groups: int) -> int:
    """Return the members of a group. Raises PackError if `groups` does not divide the ranks or some would be empty."""
    if groups < 1 or ranks % groups:
        fits = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise PackError(f"{ranks} ranks cannot form {groups} groups of one size; {fits} can be formed")
    members = ranks // groups
    if members > samples:
        raise PackError(f"{members} ranks share {samples} samples, so some would hold none; start at most {samples}")
    return members


def form_groups(placement: Placement, groups: int) -> Groups:
    """Return `groups` groups, which divide the ranks: under one switch where its ranks divide, else by number of rank.

    >>> from unisono.placement import place
    >>> form_groups(place(range(4), [0, 1, 0, 1]), 2)
    Groups(group_of_rank=(0, 1, 0, 1), member_of_rank=(0, 0, 1, 1), note='')
    """
    ranks, members = range(placement.ranks), placement.ranks // groups
    supernodes = [placement.supernode_of(rank) for rank in ranks]
    sizes = [supernodes.count(number) for number in sorted(set(supernodes))]
    divided = not any(size % members for size in sizes)
    ordered = sorted(ranks, key=lambda rank: (supernodes[rank], placement.node_of(rank)) if divided else (0, rank))
    seats = {
        rank: (group, member)
        for group in range(groups)
        for member, rank in enumerate(sorted(ordered[group * members : (group + 1) * members]))
    }
    group_of_rank, member_of_rank = zip(*(seats[rank] for rank in ranks), strict=True)
    crossing = f"groups of {members} ranks are formed by number of rank: supernodes of {sizes} ranks do not divide"
    return Groups(group_of_rank, member_of_rank, "" if divided or groups == 1 else crossing)


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
