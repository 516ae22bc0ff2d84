"""Traffic of a shuffle, predicted: bytes of the samples that leave ranks, nodes and supernodes.

    before    rank 0: a b     rank 1: c d  |  rank 2: e f     rank 3: g h      2 nodes of 2 ranks, samples of 1 KB
    after     rank 0: b c     rank 1: a e  |  rank 2: d f     rank 3: g h
    moved     a c to the other rank of the node, d e to the other node         4 KB leave ranks, 2 KB nodes

A permutation of n bytes over p ranks on m nodes of s supernodes, all of one size: n (1 - 1/p) bytes leave ranks,
n (1 - 1/m) leave nodes, and n (1 - 1/s) go through uplinks, twice: up from one supernode, down to another. Here each is
counted once. Between nodes each sample takes whole blocks (`blocks.py`) and 4 bytes for its number. The counts that
ranks exchange before are not included: 16 bytes for each pair of ranks and segment, twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono.data.shuffle_options import ShuffleOptions
from unisono.data.storage.blocks import block_of, blocks_of
from unisono.data.storage.groups import Groups
from unisono.data.storage.ownership import Owners
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
        for number, sites in enumerate((ranks, nodes, supernodes)):
            at = np.array(sites)
            counted[number] += int(moved[at[:, None] != at].sum())
    return ShuffleTraffic(*counted)


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
