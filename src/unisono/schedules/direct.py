"""Alltoall, sum, allgather: every rank owns a chunk, collects all parts of it, sums them, and gives the sum to all.

    round 0: everyone sends chunk r to rank r          round 1: rank r sends its sum of chunk r to everyone

4 ranks (`2→1` sends chunk 2 to rank 1, `+2←3` sums it into place, `2←3` replaces):

            round 0                     round 1
    rank 0  1→1 2→2 3→3 +0←1 +0←2 +0←3  0→1 0→2 0→3 1←1 2←2 3←3
    rank 1  2→2 3→3 0→0 +1←2 +1←3 +1←0  1→2 1→3 1→0 2←2 3←3 0←0
    rank 2  3→3 0→0 1→1 +2←3 +2←0 +2←1  2→3 2→0 2→1 3←3 0←0 1←1
    rank 3  0→0 1→1 2→2 +3←0 +3←1 +3←2  3→0 3→1 3→2 0←0 1←1 2←2

Rounds: 2. Bytes sent by each rank: 2n(p-1)/p. Each chunk is summed at one place in one go, so a sum is rounded once:
Theano-MPI (section 3.2) builds ASA, and ASA16 with halves on the wire, on this. Between two rounds nobody but its owner
touches a chunk; on shared memory this lets both rounds melt into one sweep (`transports/sweep.py`).

`all_to_all` is a round of the same shape with nothing to sum: chunk d goes to rank d, where it is chunk p+r.
"""

from unisono.placement import Placement
from unisono.schedules.schedule import Family, Program, Round, add, receive, send


def family(_: Placement, __: str) -> Family:
    """The same wherever ranks sit."""
    return Family(direct, part_reduce, part_broadcast, all_to_all=all_to_all)


MAX_RANKS = 64
"""Ranks up to which its p(p-1) messages a round are worth a trial."""


def worth(collective: str, placement: Placement, _: str) -> bool:
    """Among few ranks; for an allreduce, where they are alone on their nodes."""
    alone = placement.ranks == len(placement.nodes)
    return collective == "all_to_all" or (placement.ranks <= MAX_RANKS and (alone or collective != "allreduce"))


def part_reduce(rank: int, ranks: int) -> Program:
    """Reduce-scatter: rank r ends with chunk r whole. 1 round, n(p-1)/p bytes sent by each."""
    return Program(ranks, ((_collect(rank, ranks),),) if ranks > 1 else ((),), max(1, ranks - 1))


def part_broadcast(rank: int, ranks: int) -> Program:
    """All-gather: rank r gives chunk r, all end with all. 1 round, n(p-1)/p bytes sent by each."""
    return Program(ranks, ((_give(rank, ranks),),) if ranks > 1 else ((),))


def direct(rank: int, ranks: int) -> Program:
    """Allreduce: `part_reduce`, then `part_broadcast`."""
    return Program(ranks, ((_collect(rank, ranks), _give(rank, ranks)),) if ranks > 1 else ((),), max(1, ranks - 1))


def all_to_all(rank: int, ranks: int) -> Program:
    """Chunk d goes to rank d, chunk p+s comes from rank s. 1 round; each rank sends all but what it has for itself."""
    others = _others(rank, ranks)
    once = (*(send(peer, peer) for peer in others), *(receive(peer, ranks + peer) for peer in others))
    return Program(2 * ranks, ((once,),) if others else ((),))


def _collect(rank: int, ranks: int) -> Round:
    others = _others(rank, ranks)
    return (*(send(peer, peer) for peer in others), *(add(peer, rank) for peer in others))


def _give(rank: int, ranks: int) -> Round:
    others = _others(rank, ranks)
    return (*(send(peer, rank) for peer in others), *(receive(peer, peer) for peer in others))


def _others(rank: int, ranks: int) -> list[int]:
    """The other ranks, each rank beginning with the one after it, so that no rank is everyone's first."""
    return [(rank + k) % ranks for k in range(1, ranks)]
