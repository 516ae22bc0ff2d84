"""Chain: the sum runs along it to the root at its end, then the result runs back; the pieces follow one another.

    0 ← 1 ← 2 ← 3   sums          0 → 1 → 2 → 3   the result          rank 0 is the root

4 ranks, one chunk (`0→1` sends it to rank 1, `+0←3` sums it into place, `0←3` replaces):

            round 0  round 1  round 2  round 3
    rank 0  +0←1     0→1
    rank 1  +0←2     0→0      0←0      0→2
    rank 2  +0←3     0→1      0←1      0→3
    rank 3  0→2      0←2

Rounds: 4 for a rank in the middle, 2 at the ends. One piece needs 2(p-1) steps to the root and back; meanwhile the
pieces behind it keep the other links busy. Bytes sent by each rank: 2n, n at the ends. Each link carries n in each
direction and each rank communicates with two others, so long links cost no more than short ones.
Source: DIMD section 4.2, which names it, a ring reduced to a root and broadcast the other way, beside its trees.
"""

from unisono.placement import Placement
from unisono.schedules.numbering import locality_order, renumber
from unisono.schedules.schedule import Family, Program
from unisono.schedules.tree import down, up


def family(placement: Placement, _: str) -> Family:
    """Return the chain through the ranks of each node and supernode in turn: it enters and leaves each once."""
    order = locality_order(placement)
    return Family(renumber(pipeline, order), broadcast=renumber(broadcast, order), reduce=renumber(reduce, order))


MAX_RANKS = 256
"""Largest number of ranks for which an allreduce is worth a trial: its first piece passes each of them twice, one after
another."""


def worth(collective: str, placement: Placement, _: str) -> bool:
    """Return True for a broadcast, a reduction to a root, and an allreduce with one rank per node on few ranks."""
    alone = placement.ranks == len(placement.nodes)
    return collective in ("broadcast", "reduce") or (alone and placement.ranks <= MAX_RANKS)


def chain(position: int, positions: int) -> tuple[int | None, list[int]]:
    """Return the parent and the children of a position in a tree without branches."""
    return position - 1 if position else None, [position + 1] if position + 1 < positions else []


def broadcast(rank: int, ranks: int) -> Program:
    """Return a broadcast from rank 0 along the chain. 2 rounds for a middle rank; all but the last send n bytes."""
    return Program(1, (down(*chain(rank, ranks)),), steady=True)


def reduce(rank: int, ranks: int) -> Program:
    """Return a reduction along the chain to rank 0. 2 rounds for a middle rank; all but the root send n bytes."""
    return Program(1, (up(*chain(rank, ranks)),), steady=True)


def pipeline(rank: int, ranks: int) -> Program:
    """Return an allreduce: `reduce`, then `broadcast`."""
    return Program(1, (up(*chain(rank, ranks)) + down(*chain(rank, ranks)),), steady=True)
