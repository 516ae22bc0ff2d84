"""Everyone sends everything to everyone and sums: the fewest rounds there can be, for payloads of a few kilobytes.

    0 ⇄ 1 ⇄ 2 ⇄ 3, each pair once

4 ranks, one chunk (`2→1` sends chunk 2 to rank 1, `+2←3` sums it into place, `2←3` replaces):

            round 0
    rank 0  0→1 0→2 0→3 +0←1 +0←2 +0←3
    rank 1  0→2 0→3 0→0 +0←2 +0←3 +0←0
    rank 2  0→3 0→0 0→1 +0←3 +0←0 +0←1
    rank 3  0→0 0→1 0→2 +0←0 +0←1 +0←2

Rounds: 1. Bytes sent by each rank: n(p-1). Since a round's contributions are summed in the order of their ranks, all
ranks make the same bits, and the same as `direct` makes.
"""

from unisono.placement import Placement
from unisono.schedules.schedule import Family, Program, add, send


def family(_: Placement, __: str) -> Family:
    """The same wherever ranks sit."""
    return Family(flat)


def worth(_: str, __: Placement, ___: str) -> bool:
    """Within a node alone: between nodes p n bytes are too many."""
    return False


def flat(rank: int, ranks: int) -> Program:
    """Allreduce in one round."""
    others = [(rank + k) % ranks for k in range(1, ranks)]
    once = (*(send(peer, 0) for peer in others), *(add(peer, 0) for peer in others))
    return Program(1, ((once,),) if others else ((),), max(1, len(others)))
