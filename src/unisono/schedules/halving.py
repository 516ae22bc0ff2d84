"""Recursive halving, then recursive doubling, for any number of ranks, numbered in order.

4 ranks, 4 chunks. Partners are p/2 apart at first, then closer; each sends the half that its partner keeps:

            round 0       round 1   round 2  round 3
    rank 0  2-3→2 +0-1←2  1→1 +0←1  0→1 1←1  0-1→2 2-3←2
    rank 1  2-3→3 +0-1←3  0→0 +1←0  1→0 0←0  0-1→3 2-3←3
    rank 2  0-1→0 +2-3←0  3→3 +2←3  2→3 3←3  2-3→0 0-1←0
    rank 3  0-1→1 +2-3←1  2→2 +3←2  3→2 2←2  2-3→1 0-1←1

Rounds: 2 log2 p. Bytes sent by each rank: 2n(p-1)/p. The largest messages go to the farthest ranks, which is slow if
the nodes of a supernode share an uplink (swCaffe section 5.1, equations 2 and 3).

If p is not a power of two, 2^k < p < 2^(k+1): each of the first p - 2^k odd ranks and the even rank before it first sum
one half each. The odd rank sends its half to the even rank and receives the result at the end. With 3 ranks (2 chunks):

            round 0   round 1  round 2   round 3  round 4
    rank 0  1→1 +0←1  1←1      1→2 +0←2  0→2 1←2  0-1→1
    rank 1  0→0 +1←0  1→0      0-1←0
    rank 2  0→0 +1←0  1→0 0←0

That adds 3 rounds and, for an even rank with a partner, 3n/2 bytes sent.
Source: Thakur, Rabenseifner and Gropp, 2005; swCaffe section 5.1.
"""

from unisono.placement import Placement
from unisono.schedules.numbering import renumber, round_robin, suits_round_robin
from unisono.schedules.schedule import Family, Lane, Program, Round, add, receive, send

VARIANTS = ("round-robin",)
"""Round-robin numbering of ranks over supernodes keeps the large messages inside them (swCaffe 5.1)."""


def family(placement: Placement, variant: str) -> Family:
    """Return the schedule in the order of ranks, or with round-robin numbering."""
    if not variant:
        return Family(halving)
    return Family(renumber(halving, round_robin(placement)))


def worth(_: str, placement: Placement, variant: str) -> bool:
    """Return True for one rank per node; for round-robin, if it also keeps large messages inside supernodes."""
    alone = placement.ranks == len(placement.nodes)
    return alone and (not variant or suits_round_robin(placement, single=True))


def halving(rank: int, ranks: int) -> Program:
    """Return an allreduce. The number of chunks is the largest power of two that is not above `ranks`."""
    core = 1 << (ranks.bit_length() - 1)
    folded = ranks - core
    if rank >= 2 * folded:
        lane = _core(rank - folded, core, folded)
    else:
        lane = _odd(rank, core) if rank % 2 else _even(rank, core, folded)
    return Program(core, (lane,), max(1, core // 2))


def _even(rank: int, core: int, folded: int) -> Lane:
    """Return the rounds of an even rank that takes part for the odd one behind it."""
    odd, half = rank + 1, core // 2
    before: Lane = ((send(odd, half, half), add(odd, 0, half)), (receive(odd, half, half),))
    return (*before, *_core(rank // 2, core, folded), (send(odd, 0, core),))


def _odd(rank: int, core: int) -> Lane:
    even, half = rank - 1, core // 2
    return (send(even, 0, half), add(even, half, half)), (send(even, half, half),), (receive(even, 0, core),)


def _core(position: int, core: int, folded: int) -> Lane:
    """Return the rounds of one of `core` positions, a power of two."""

    def rank_of(even: int) -> int:
        """Return twice the position of an even rank with a partner; `folded` more than that of any other."""
        return even + folded - (folded - even) * (even < folded)

    halvings: list[Round] = []
    doublings: list[Round] = []
    distance = core // 2
    while distance:
        partner = position ^ distance
        mine, theirs = position & -distance, partner & -distance  # first chunk of the half that each of the two keeps
        halvings.append((send(rank_of(partner), theirs, distance), add(rank_of(partner), mine, distance)))
        doublings.insert(0, (send(rank_of(partner), mine, distance), receive(rank_of(partner), theirs, distance)))
        distance //= 2
    return (*halvings, *doublings)
