"""Split tree: even ranks have a tree for half of the payload, odd ranks one for the other; partners exchange halves.

    broadcast     0 ─┬─ A ─▶ 4 ── A ─▶ 6         0 ── B ─▶ 1 ─┬─ B ─▶ 5 ── B ─▶ 7
    of A and B       └─ A ─▶ 2                                └─ B ─▶ 3
                  then 0 and 1, 2 and 3, 4 and 5, 6 and 7 give each other what they have

A broadcast of 4 ranks, 2 chunks (`0→2` sends chunk 0 to rank 2, `0←0` receives it):

            round 0      round 1  round 2
    rank 0  1→1 0→2 0→1
    rank 1  1←0          1→3      0←0
    rank 2  0←0          0→3 1←3
    rank 3  1←1          1→2 0←2

A reduction is that backwards, with sums. In an allreduce the ranks of a tree sum by recursive doubling:

            round 0   round 1   round 2
    rank 0  1→1 +0←1  0→2 +0←2  0→1 1←1
    rank 1  0→0 +1←0  1→3 +1←3  1→0 0←0
    rank 2  1→3 +0←3  0→0 +0←0  0→3 1←3
    rank 3  0→2 +1←2  1→1 +1←1  1→2 0←2

If p is no power of two, sums go up both trees and down instead. If p is odd, the last rank has no partner, and the one
before it has two.

Steps: log2 p + 1 (2 log2 p of an allreduce, if p is no power of two). Bytes sent by each rank: at most
n/2 (log2 p + 1). Messages of a broadcast: 2p-2, where `circulant` has p-1 and p log2 p shorter ones. Used for payloads
whose time is as much that of their messages as that of their bytes.
Source: the split binary tree of Pjesivac-Grbovic and others, 2007, here of binomial trees.
"""

from __future__ import annotations

from unisono.placement import Placement
from unisono.schedules.numbering import locality_order, renumber
from unisono.schedules.schedule import Family, Lane, Program, add, receive, send
from unisono.schedules.tree import children, down, parent, up


def family(placement: Placement, _: str) -> Family:
    """Return the schedules. Partners are near each other, so that a broadcast's half enters a supernode once."""
    order = locality_order(placement)
    allreduce, *one_way = (renumber(make, order) for make in (split_tree, broadcast, reduce))
    return Family(allreduce, None, None, *one_way)


def split_tree(rank: int, ranks: int) -> Program:
    """Return an allreduce."""
    if ranks & (ranks - 1):
        sums = up(*_links(rank, ranks), rank % 2) + down(*_links(rank, ranks), rank % 2)
    else:
        distances = (2 << bit for bit in range(ranks.bit_length() - 2))
        sums = tuple((send(rank ^ distance, rank % 2), add(rank ^ distance, rank % 2)) for distance in distances)
    return Program(2, ((*_sum_halves(rank, ranks), *sums, *_exchange(rank, ranks)),), _landing(ranks))


def broadcast(rank: int, ranks: int) -> Program:
    """Return a broadcast from rank 0. It sends the odd ranks their half first, which goes one step further."""
    above, below = _links(rank, ranks)
    if rank == 0:
        first = (send(1, 1), *(send(child, 0) for child in below), send(1, 0))
        return Program(2, ((first,) if ranks > 1 else (),))
    return Program(2, ((*down(0 if rank == 1 else above, below, rank % 2), *_exchange(rank, ranks, to_root=False)),))


def reduce(rank: int, ranks: int) -> Program:
    """Return a reduction to rank 0."""
    above, below = _links(rank, ranks)
    lane = (*_sum_halves(rank, ranks), *up(0 if rank == 1 else above, below, rank % 2))
    if rank == 0 and ranks > 1:
        lane = (*lane, (receive(1, 1),))
    return Program(2, (lane,), _landing(ranks))


def _links(rank: int, ranks: int) -> tuple[int | None, list[int]]:
    """Return a rank's parent and children, which are even or odd as it is."""
    place, count = rank // 2, (ranks + 1 - rank % 2) // 2
    below = [2 * child + rank % 2 for child in children(place, count)]
    return 2 * parent(place) + rank % 2 if place else None, below


def _partners(rank: int, ranks: int) -> tuple[list[int], int | None]:
    """Return the ranks that have the other half from this one, and the rank from which it has that; None if alone."""
    partner = rank ^ 1
    if partner == ranks:  # the last of an odd number
        return [], ranks - 2 if ranks > 1 else None
    return [partner, *([ranks - 1] if ranks % 2 and rank == ranks - 2 else [])], partner


def _exchange(rank: int, ranks: int, to_root: bool = True) -> Lane:
    """Return the round in which partners give each other their halves."""
    takers, giver = _partners(rank, ranks)
    gives = [send(taker, rank % 2) for taker in takers if taker or to_root]
    return ((*gives, receive(giver, 1 - rank % 2)),) if giver is not None else ()


def _sum_halves(rank: int, ranks: int) -> Lane:
    """Return the round in which partners give each other what the other's tree sums."""
    takers, giver = _partners(rank, ranks)
    sums = [add(taker, rank % 2) for taker in takers]
    return ((send(giver, 1 - rank % 2), *sums),) if giver is not None else ()


def _landing(ranks: int) -> int:
    return max(1 + ranks % 2, len(children(0, (ranks + 1) // 2)))
