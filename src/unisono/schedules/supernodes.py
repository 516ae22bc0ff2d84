"""Sums within each supernode, then between the supernodes, and back: few rounds, and few bytes over the uplinks.

    supernode 0   rank 0 ═ rank 1     within a supernode of q ranks, rank j collects the sum of column j of the payload,
                    ║        ║        sums it with the ranks of the other supernodes that have the same column,
    supernode 1   rank 2 ═ rank 3     and gives it back to its supernode

4 ranks in 2 supernodes (`2-3→1` sends chunks 2 and 3 to rank 1, `+0-1←1` sums them into place, `2-3←1` replaces):

            round 0       round 1   round 2  round 3
    rank 0  2-3→1 +0-1←1  1→2 +0←2  0→2 1←2  0-1→1 2-3←1
    rank 1  0-1→0 +2-3←0  3→3 +2←3  2→3 3←3  2-3→0 0-1←0
    rank 2  2-3→3 +0-1←3  0→0 +1←0  1→0 0←0  0-1→3 2-3←3
    rank 3  0-1→2 +2-3←2  2→1 +3←1  3→1 2←1  2-3→2 0-1←2

Each of the three parts is that part of `circulant`, for any number of ranks and of supernodes. There are as many
columns as the smallest supernode has ranks; further ranks of another send their payload to those with columns first, a
column to each, and receive the sums at the end.

Rounds, for S supernodes of q ranks: 2 ceil(log2 q) + 2 ceil(log2 S), and 2 more where their numbers of ranks differ.
Bytes sent by each rank: 2n(p-1)/p; over an uplink 2n(S-1)/S, the least possible. `halving/round-robin` does the same
where both numbers are powers of two. While a piece is between the supernodes, others are within them.
Source: swCaffe section 5.1, whose numbering has this order of rounds; any numbers by Bruck and others, 1997.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.placement import Placement
from unisono.schedules.circulant import all_gather, circulant, reduce_scatter
from unisono.schedules.schedule import Algorithm, Family, Lane, Program, add, receive, send


def family(placement: Placement, _: str) -> Family:
    """Return the schedule for this placement. It cannot be renumbered."""
    return Family(supernodes(placement))


def worth(_: str, placement: Placement, __: str) -> bool:
    """Return True for one rank per node in several supernodes, each of several nodes."""
    return placement.ranks == len(placement.nodes) and min(map(len, members(placement))) > 1 < len(members(placement))


def members(placement: Placement) -> list[list[int]]:
    """Return the ranks of each supernode, ascending.

    >>> from unisono.placement import place
    >>> members(place("abcde", "xyxyy"))
    [[0, 2], [1, 3, 4]]
    """
    by_supernode: dict[int, list[int]] = {}
    for rank in range(placement.ranks):
        by_supernode.setdefault(placement.supernode_of(rank), []).append(rank)
    return list(by_supernode.values())


def supernodes(placement: Placement) -> Algorithm:
    """Return the allreduce for this placement, in columns of as many chunks as there are supernodes."""
    groups = members(placement)
    width, height = min(map(len, groups)), len(groups)
    further = max(map(len, groups)) - width
    landing = max(height * max(reduce_scatter(0, width).landing, further), circulant(0, height).landing)

    def algorithm(rank: int, ranks: int) -> Program:
        assert ranks == placement.ranks, "this schedule is for the placement that it was made for"
        supernode = next(supernode for supernode, group in enumerate(groups) if rank in group)
        group = groups[supernode]
        lane = _lane(groups, supernode, group.index(rank), width)
        return Program(width * height, (tuple(transfers for transfers in lane if transfers),), landing)

    return algorithm


def _lane(groups: Sequence[Sequence[int]], supernode: int, column: int, width: int) -> Lane:
    """Return the rounds of the rank of a column of `supernode`, or of a further one; some may be empty."""
    group, height = groups[supernode], len(groups)
    columns = range(0, width * height, height)
    if column >= width:
        owners = list(zip(group, columns, strict=False))
        return tuple(tuple(make(peer, first, height) for peer, first in owners) for make in (send, receive))
    owners_of_column = [ranks[column] for ranks in groups]
    return (
        tuple(add(peer, columns[column], height) for peer in group[width:]),
        *_placed(reduce_scatter(column, width), group, height),
        *_placed(circulant(supernode, height), owners_of_column, 1, columns[column]),
        *_placed(all_gather(column, width), group, height),
        tuple(send(peer, columns[column], height) for peer in group[width:]),
    )


def _placed(program: Program, ranks: Sequence[int], span: int, first: int = 0) -> Lane:
    """Return the rounds of a program for these ranks, each of whose chunks is `span` of ours, from `first` on."""
    (lane,) = program.lanes
    return tuple(
        tuple(t._replace(peer=ranks[t.peer], chunk=first + t.chunk * span, span=t.span * span) for t in transfers)
        for transfers in lane
    )
