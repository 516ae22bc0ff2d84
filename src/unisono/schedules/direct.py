"""All-to-all, sum, all-gather: every rank owns a chunk, receives all parts of it, sums them, and sends the sum to all.

    round 0: everyone sends chunk r to rank r          round 1: rank r sends its sum of chunk r to everyone

4 ranks (`2→1` sends chunk 2 to rank 1, `+2←3` sums it into place, `2←3` replaces):

            round 0                     round 1
    rank 0  1→1 2→2 3→3 +0←1 +0←2 +0←3  0→1 0→2 0→3 1←1 2←2 3←3
    rank 1  2→2 3→3 0→0 +1←2 +1←3 +1←0  1→2 1→3 1→0 2←2 3←3 0←0
    rank 2  3→3 0→0 1→1 +2←3 +2←0 +2←1  2→3 2→0 2→1 3←3 0←0 1←1
    rank 3  0→0 1→1 2→2 +3←0 +3←1 +3←2  3→0 3→1 3→2 0←0 1←1 2←2

Rounds: 2. Bytes sent by each rank: 2n(p-1)/p. One rank sums a chunk in one operation, so a sum is rounded once:
Theano-MPI (section 3.2) builds ASA, and ASA16 with float16 messages, on this. Between two rounds only its owner
accesses a chunk; on shared memory both rounds can therefore be one pass (`transports/fused.py`).

`all_to_all` is a round of the same form without sums: chunk d goes to rank d, where it is chunk p+r.
"""

from unisono.placement import Placement
from unisono.schedules.schedule import Family, Program, Round, add, others, receive, send


def family(_: Placement, __: str) -> Family:
    """Return the schedules, which do not depend on the placement."""
    return Family(direct, reduce_scatter, all_gather, all_to_all=all_to_all)


MAX_RANKS = 64
"""Largest number of ranks for which its p(p-1) messages per round are worth a trial."""


def worth(collective: str, placement: Placement, _: str) -> bool:
    """Return True for few ranks (an allreduce: with one rank per node), and always for all_to_all."""
    alone = placement.ranks == len(placement.nodes)
    return collective == "all_to_all" or (placement.ranks <= MAX_RANKS and (alone or collective != "allreduce"))


def reduce_scatter(rank: int, ranks: int) -> Program:
    """Return a reduce-scatter: rank r ends with the sum of chunk r. 1 round, n(p-1)/p bytes sent by each rank."""
    return Program(ranks, ((_collect(rank, ranks),),) if ranks > 1 else ((),), max(1, ranks - 1))


def all_gather(rank: int, ranks: int) -> Program:
    """Return an all-gather of chunk r from each rank r. 1 round, n(p-1)/p bytes sent by each rank."""
    return Program(ranks, ((_give(rank, ranks),),) if ranks > 1 else ((),))


def direct(rank: int, ranks: int) -> Program:
    """Return an allreduce: `reduce_scatter`, then `all_gather`."""
    return Program(ranks, ((_collect(rank, ranks), _give(rank, ranks)),) if ranks > 1 else ((),), max(1, ranks - 1))


def all_to_all(rank: int, ranks: int) -> Program:
    """Return an all-to-all: chunk d goes to rank d, chunk p+s comes from rank s. 1 round; the own chunk is not sent."""
    peers = others(rank, ranks)
    once = (*(send(peer, peer) for peer in peers), *(receive(peer, ranks + peer) for peer in peers))
    return Program(2 * ranks, ((once,),) if peers else ((),))


def _collect(rank: int, ranks: int) -> Round:
    peers = others(rank, ranks)
    return (*(send(peer, peer) for peer in peers), *(add(peer, rank) for peer in peers))


def _give(rank: int, ranks: int) -> Round:
    peers = others(rank, ranks)
    return (*(send(peer, rank) for peer in peers), *(receive(peer, peer) for peer in peers))
