"""Every rank sends its whole payload to all others and sums: the minimum of rounds, for payloads of a few kilobytes.

    0 ⇄ 1 ⇄ 2 ⇄ 3, each pair once

4 ranks, one chunk (`2→1` sends chunk 2 to rank 1, `+2←3` sums it into place, `2←3` replaces):

            round 0
    rank 0  0→1 0→2 0→3 +0←1 +0←2 +0←3
    rank 1  0→2 0→3 0→0 +0←2 +0←3 +0←0
    rank 2  0→3 0→0 0→1 +0←3 +0←0 +0←1
    rank 3  0→0 0→1 0→2 +0←0 +0←1 +0←2

Rounds: 1. Bytes sent by each rank: n(p-1). The contributions of a round are summed in the order of ranks, so all ranks
end with the same bits, equal to those of `direct`.
"""

from unisono.placement import Placement
from unisono.schedules.schedule import Family, Program, add, others, send


def family(_: Placement, __: str) -> Family:
    """Return the schedule, which does not depend on the placement."""
    return Family(flat)


def flat(rank: int, ranks: int) -> Program:
    """Return an allreduce in one round."""
    peers = others(rank, ranks)
    once = (*(send(peer, 0) for peer in peers), *(add(peer, 0) for peer in peers))
    return Program(1, ((once,),) if peers else ((),), max(1, len(peers)))
