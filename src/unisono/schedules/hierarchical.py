"""Sum within the nodes, any schedule between them, copy within the nodes: few bytes cross the links between nodes.

    node 0   rank 0 ═ rank 1     every rank of a node owns a column of the payload; it sums that column over its node,
               ║        ║        goes through the schedule with the owners of the same column on the other nodes, and
    node 1   rank 2 ═ rank 3     gives the finished column to its node

4 ranks on 2 nodes, `ring` between the nodes (`2→1` sends chunk 2 to rank 1, `+2←3` sums it into place, `2←3` replaces):

    lane 0
            round 0  round 1   round 2  round 3
    rank 0  +0-1←1   1→2 +0←2  0→2 1←2  0-1→1
    rank 1  0-1→0    0-1←0
    rank 2  +0-1←3   0→0 +1←0  1→0 0←0  0-1→3
    rank 3  0-1→2    0-1←2

    lane 1
            round 0  round 1   round 2  round 3
    rank 0  2-3→1    2-3←1
    rank 1  +2-3←0   3→3 +2←3  2→3 3←3  2-3→0
    rank 2  2-3→3    2-3←3
    rank 3  +2-3←2   2→1 +3←1  3→1 2←1  2-3→2

There are as many columns as the smallest node has ranks; further ranks own none. Each column is a separate lane, cut
into the chunks of the schedule between the N nodes. If that schedule has several lanes, each column has as many.

Rounds: 2 more than the schedule between the nodes. Bytes: a rank of a node of k sends up to 2n(k-1)/k within its node.
The link of a node carries the bytes of one rank of the schedule between nodes: 2n(N-1)/N for `ring`, `halving` and
`direct`, compared to 2n(p-1)/p for a ring of all p ranks. With one rank per node it is the schedule between the nodes.
Source: DIMD, which sums the GPUs of a node before its trees between nodes; the columns make every rank take part.
"""

from __future__ import annotations

from itertools import groupby

from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm, Family, Lane, Program, add, receive, send

BETWEEN = "ring"
"""Default schedule between the nodes."""


def family(placement: Placement, between: Family) -> Family:
    """Return the schedule for this placement, with `between` for `nodes_of` it. It cannot be renumbered."""
    return Family(hierarchical(placement, between.allreduce))


def columns(placement: Placement) -> int:
    """Return the number of columns of the payload: the number of ranks that every node has at least."""
    return min(map(len, placement.nodes))


def nodes_of(placement: Placement) -> Placement:
    """Return the placement of the schedule between the nodes: its rank i stands for one rank of node i."""
    return Placement(tuple((node,) for node in range(len(placement.nodes))), placement.supernodes)


def hierarchical(placement: Placement, among_nodes: Algorithm, width: int | None = None) -> Algorithm:
    """Return the allreduce with `among_nodes` between the nodes, in `width` columns; by default as many as possible."""
    width, largest = width or columns(placement), max(map(len, placement.nodes))

    def algorithm(rank: int, ranks: int) -> Program:
        assert ranks == placement.ranks, "a hierarchical schedule is for the placement that it was made for"
        node = placement.node_of(rank)
        inner = among_nodes(node, len(placement.nodes))
        lanes = [_lane(placement, rank, column, lane, inner.chunks) for column in range(width) for lane in inner.lanes]
        carried = max(sum(span for _, span in _runs(lane, inner.chunks)) for lane in inner.lanes)
        landing = max(inner.landing, (largest - 1) * carried)
        far = inner.landing if largest > 1 else None
        return Program(width * inner.chunks, tuple(lanes), landing, width, far, inner.steady)

    return algorithm


def _lane(placement: Placement, rank: int, column: int, inner: Lane, chunks: int) -> Lane:
    """Return one lane: the owner collects, runs a lane between the nodes, and sends back; others send and receive."""
    node = placement.nodes[placement.node_of(rank)]
    owner = node[column]
    runs = [(column * chunks + first, span) for first, span in _runs(inner, chunks)]
    if rank != owner:
        return tuple(send(owner, *run) for run in runs), tuple(receive(owner, *run) for run in runs)
    owners = [ranks[column] for ranks in placement.nodes]
    among_owners = tuple(
        tuple(t._replace(peer=owners[t.peer], chunk=column * chunks + t.chunk) for t in transfers)
        for transfers in inner
    )
    others = [peer for peer in node if peer != owner]
    if not others:
        return among_owners
    collect = tuple(add(peer, *run) for peer in others for run in runs)
    give = tuple(send(peer, *run) for peer in others for run in runs)
    return (collect, *among_owners, give)


def _runs(lane: Lane, chunks: int) -> list[tuple[int, int]]:
    """Return (first, span) of each run of neighbouring chunks that a lane carries, of `chunks` in all.

    In any algorithm a rank must receive every chunk, so its own transfers name all chunks of the lane. On one node
    there are no transfers between nodes, and the one lane has all chunks.
    """
    named = {chunk for transfers in lane for t in transfers for chunk in range(t.chunk, t.chunk + t.span)} or set(
        range(chunks)
    )
    runs = [[chunk for _, chunk in run] for _, run in groupby(enumerate(sorted(named)), lambda pair: pair[1] - pair[0])]
    return [(run[0], len(run)) for run in runs]
