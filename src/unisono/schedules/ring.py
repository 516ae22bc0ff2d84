"""Ring: partial sums travel around once, then the finished sums travel around once more.

    0 → 1 → 2 → 3 → 0          chunk c is summed along c+1 → c+2 → ... → c, where it is whole

4 ranks; in each round a rank sends one chunk ahead and takes one from behind (`2→1` sends chunk 2 to rank 1, `+2←3`
sums it into place, `2←3` replaces):

            round 0   round 1   round 2   round 3  round 4  round 5
    rank 0  3→1 +2←3  2→1 +1←3  1→1 +0←3  0→1 3←3  3→1 2←3  2→1 1←3
    rank 1  0→2 +3←0  3→2 +2←0  2→2 +1←0  1→2 0←0  0→2 3←0  3→2 2←0
    rank 2  1→3 +0←1  0→3 +3←1  3→3 +2←1  2→3 1←1  1→3 0←1  0→3 3←1
    rank 3  2→0 +1←2  1→0 +0←2  0→0 +3←2  3→0 2←2  2→0 1←2  1→0 0←2

Rounds: 2(p-1). Bytes sent by each rank: 2n(p-1)/p, the minimum; every link carries equally many.
Source: Patarasuk and Yuan, 2009; DIMD section 4.2 names it beside its trees.
"""

from unisono.placement import Placement
from unisono.schedules.numbering import locality_order, renumber
from unisono.schedules.schedule import Family, Program, Round, add, receive, send


def family(placement: Placement, _: str) -> Family:
    """Return the ring through the ranks of each node and supernode in turn: it enters and leaves each once."""
    order = locality_order(placement)
    return Family(
        renumber(ring, order),
        renumber(reduce_scatter, order, chunks_too=True),
        renumber(all_gather, order, chunks_too=True),
    )


def worth(_: str, __: Placement, ___: str) -> bool:
    """Return True: it sends the fewest bytes, which is good for long payloads on any placement."""
    return True


def reduce_scatter(rank: int, ranks: int) -> Program:
    """Return a reduce-scatter: rank r ends with the sum of chunk r. p-1 rounds, n(p-1)/p bytes sent by each rank."""
    return Program(ranks, (_reduce_rounds(rank, ranks),), steady=True)


def all_gather(rank: int, ranks: int) -> Program:
    """Return an all-gather of chunk r from each rank r. p-1 rounds, n(p-1)/p bytes sent by each rank."""
    return Program(ranks, (_gather_rounds(rank, ranks),), steady=True)


def ring(rank: int, ranks: int) -> Program:
    """Return an allreduce: `reduce_scatter`, then `all_gather`."""
    return Program(ranks, (_reduce_rounds(rank, ranks) + _gather_rounds(rank, ranks),), steady=True)


def _reduce_rounds(rank: int, ranks: int) -> tuple[Round, ...]:
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
    return tuple((send(ahead, (rank - k - 1) % ranks), add(behind, (rank - k - 2) % ranks)) for k in range(ranks - 1))


def _gather_rounds(rank: int, ranks: int) -> tuple[Round, ...]:
    ahead, behind = (rank + 1) % ranks, (rank - 1) % ranks
    return tuple((send(ahead, (rank - k) % ranks), receive(behind, (rank - k - 1) % ranks)) for k in range(ranks - 1))
