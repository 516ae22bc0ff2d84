"""Ownership: the rank that holds each sample, the same on every rank.

When a pack is read, each rank takes a stretch of it, so that it reads few stripes. In an epoch a rank holds the samples
that it will see in that epoch. They depend on the order alone (`data/order.py`): 10 samples, batches of 4, 2 ranks

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

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import ShuffleOptions, ranks_of
from unisono.errors import PackError
from unisono.placement import Placement

Owners = NDArray[np.integer]
"""Member of a group that holds each sample: its owner."""


def check_groups(samples: int, ranks: int, groups: int) -> int:
    """Return the members of a group. Raises PackError if `groups` does not divide the ranks or some would be empty."""
    if groups < 1 or ranks % groups:
        fits = [number for number in range(1, ranks + 1) if ranks % number == 0]
        raise PackError(f"{ranks} ranks cannot form {groups} groups of one size; {fits} can be formed")
    members = ranks // groups
    if members > samples:
        raise PackError(f"{members} ranks share {samples} samples, so some would hold none; start at most {samples}")
    return members


def initial_owners(samples: int, members: int) -> NDArray[np.int32]:
    """Return the owners when a pack is read: a stretch for each member, as even as possible; int32."""
    positions = np.arange(samples, dtype=np.int64)
    return (((positions + 1) * members - 1) // max(1, samples)).astype(np.int32)


def owners_in_epoch(order: NDArray[np.int64], batch: int, member_of_rank: NDArray[np.integer]) -> Owners:
    """Return the owners in an epoch with this order, in the smallest dtype, since the access is random.

    `member_of_rank` has the number of each rank in its group.
    """
    members = member_of_rank.astype(np.min_scalar_type(int(member_of_rank.max())))
    held = np.empty(len(order), members.dtype)
    held[order] = members[ranks_of(len(order), batch, len(members))]
    return held


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
