"""Binomial tree: sums go up to rank 0, the result goes down; the minimum of messages, for the shortest payloads.

    0 ─┬─ 4 ─┬─ 6 ── 7         the parent of a position is its number without the lowest set bit;
       │     └─ 5              the positions below a position follow it without a gap
       ├─ 2 ─── 3
       └─ 1

4 ranks, one chunk (`0→1` sends it to rank 1, `+0←3` sums it into place, `0←3` replaces):

            round 0    round 1  round 2  round 3
    rank 0  +0←2 +0←1  0→2 0→1
    rank 1  0→0        0←0
    rank 2  +0←3       0→0      0←0      0→3
    rank 3  0→2        0←2

Rounds: 4 for a rank with a parent and children, 2 for one that lacks either; 2 log2 p steps from the first message to
the last. Messages: 2(p-1) in all, the minimum: every rank but the root must send and receive one. Bytes sent by each
rank: n for a leaf, up to n log2 p at the root. The root sums from all its children in one round, and sends to the child
with the most ranks below it first.
Source: Thakur, Rabenseifner and Gropp, 2005.
"""

from unisono.placement import Placement
from unisono.schedules.numbering import locality_order, renumber
from unisono.schedules.schedule import Family, Program, Round, add, receive, send


def family(placement: Placement, _: str) -> Family:
    """Return the tree with near ranks below each other, so that few messages leave a node and a supernode."""
    order = locality_order(placement)
    return Family(renumber(tree, order), broadcast=renumber(broadcast, order), reduce=renumber(reduce, order))


def worth(_: str, __: Placement, ___: str) -> bool:
    """Return True: it sends few messages, which is good for short payloads on any placement."""
    return True


def broadcast(rank: int, ranks: int) -> Program:
    """Return a broadcast from rank 0 down the tree. log2 p steps, p-1 messages in all."""
    return Program(1, (_down(rank, ranks),))


def reduce(rank: int, ranks: int) -> Program:
    """Return a reduction up the tree to rank 0. log2 p steps, p-1 messages in all."""
    return Program(1, (_up(rank, ranks),), max(1, len(children(0, ranks))))


def tree(rank: int, ranks: int) -> Program:
    """Return an allreduce: `reduce`, then `broadcast`."""
    return Program(1, (_up(rank, ranks) + _down(rank, ranks),), max(1, len(children(0, ranks))))


def _up(rank: int, ranks: int) -> tuple[Round, ...]:
    below = tuple(add(child, 0) for child in children(rank, ranks))
    above: tuple[Round, ...] = ((send(parent(rank), 0),),) if rank else ()
    return ((below,) if below else ()) + above


def _down(rank: int, ranks: int) -> tuple[Round, ...]:
    above: tuple[Round, ...] = ((receive(parent(rank), 0),),) if rank else ()
    below = tuple(send(child, 0) for child in children(rank, ranks))
    return above + ((below,) if below else ())


def parent(position: int) -> int:
    """Return the parent of a position other than 0."""
    return position & (position - 1)


def children(position: int, positions: int) -> list[int]:
    """Return the children of a position, those with the most positions below them first."""
    lowest = position & -position or positions
    distances = [1 << bit for bit in reversed(range(positions.bit_length())) if 1 << bit < lowest]
    return [position + distance for distance in distances if position + distance < positions]
