"""Ownership: the rank that holds each sample, the same on every rank.

When a pack is read, each rank takes a stretch of it, so that it reads few stripes. In an epoch a rank holds the samples
that it will see in that epoch. They depend on the order alone (`data/order.py`): 10 samples, batches of 4, 2 ranks

    read            rank 0: 0 1 2 3 4         rank 1: 5 6 7 8 9
    epoch's order   7 2 9 4 | 0 5 1 8 | 3 6
    held            rank 0: 7 2  0 5  3       rank 1: 9 4  1 8  6

So a shuffle is a true permutation, it is the same for any number of ranks, and no rank ever needs a sample of another.
If each of several groups holds a copy (`groups.py`), members with the same number in their groups hold the same
samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import ranks_of
from unisono.errors import PackError

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
