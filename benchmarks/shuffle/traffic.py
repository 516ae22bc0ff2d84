"""Traffic of a shuffle, predicted: bytes of the samples that leave ranks, nodes and supernodes.

    before    rank 0: a b     rank 1: c d  |  rank 2: e f     rank 3: g h      2 nodes of 2 ranks, samples of 1 KB
    after     rank 0: b c     rank 1: a e  |  rank 2: d f     rank 3: g h
    moved     a c to the other rank of the node, d e to the other node         4 KB leave ranks, 2 KB nodes

A permutation of n bytes over p ranks on m nodes of s supernodes, all of one size: n (1 - 1/p) bytes leave ranks,
n (1 - 1/m) leave nodes, and n (1 - 1/s) go through uplinks, twice: up from one supernode, down to another. Here each is
counted once. Between nodes each sample takes whole blocks (`storage/sample_store.py`) and 4 bytes for its number. The
counts that ranks exchange before are not included: 16 bytes for each pair of ranks and segment, twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import ShuffleOptions, epoch_order, ranks_of
from unisono.data.storage.partitioned import Groups, Owners, form_groups, owners_in_epoch
from unisono.data.storage.sample_store import block_of, blocks_of
from unisono.placement import Placement

NUMBER_BYTES = 4
"""Bytes of the number that is sent with each sample."""


class ShuffleTraffic(NamedTuple):
    """Bytes of samples that a shuffle moves, over all ranks."""

    ranks: int
    """Bytes that leave a rank."""
    nodes: int
    """Bytes that leave a node."""
    uplinks: int
    """Bytes that leave a supernode, through its uplink."""


def shuffle_traffic(
    before: Owners, after: Owners, lengths: NDArray[np.int32], groups: Groups, placement: Placement
) -> ShuffleTraffic:
    """Return the traffic of a shuffle from the owners `before` to those `after`, in all groups.

    `lengths` has the bytes of each sample. Owners are members of a group, the same in each.
    """
    block = block_of(lengths)
    sizes = blocks_of(lengths, block).astype(np.int64) * block + NUMBER_BYTES
    members = len(groups.group_of_rank) // (max(groups.group_of_rank) + 1)
    pairs = before.astype(np.int64) * members + after
    moved = np.bincount(pairs, sizes, members * members).astype(np.int64).reshape(members, members)
    counted = [0, 0, 0]
    for group in sorted(set(groups.group_of_rank)):
        ranks = [rank for rank, its in enumerate(groups.group_of_rank) if its == group]
        ranks.sort(key=groups.member_of_rank.__getitem__)
        nodes = [placement.node_of(rank) for rank in ranks]
        supernodes = [placement.supernode_of(rank) for rank in ranks]
        for level, sites in enumerate((ranks, nodes, supernodes)):
            site = np.array(sites)
            counted[level] += int(moved[site[:, None] != site].sum())
    return ShuffleTraffic(*counted)


def epochs_traffic(
    lengths: NDArray[np.int32],
    batch: int,
    seed: int,
    epochs: int,
    shuffle: ShuffleOptions,
    placement: Placement,
    groups: int,
) -> list[ShuffleTraffic]:
    """Return the traffic of each epoch's shuffle; the first one begins with the stretches that ranks read."""
    formed, traffic = form_groups(placement, groups), list[ShuffleTraffic]()
    owners = ranks_of(len(lengths), len(lengths), placement.ranks // groups)
    for epoch in range(epochs):
        order = epoch_order(len(lengths), batch, seed, epoch, shuffle)
        after = owners_in_epoch(order, batch, np.array(formed.member_of_rank))
        traffic.append(shuffle_traffic(owners, after, lengths, formed, placement))
        owners = after
    return traffic
