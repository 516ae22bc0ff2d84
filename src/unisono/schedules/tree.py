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

`tree/binary` gives a rank two children at most, each with half of the positions below it: no more steps on 8 ranks, and
a link carries 2n at most. Calls one after another take as long as the busiest link. In `tree/star` all are children of
the root: one step up or down, and n(p-1) bytes on its link.
"""

from collections.abc import Callable
from functools import partial

from unisono.placement import Placement
from unisono.schedules.numbering import locality_order, renumber
from unisono.schedules.schedule import Family, Lane, Program, add, receive, send

VARIANTS = ("binary", "star")

Links = Callable[[int, int], tuple[int | None, list[int]]]
"""Function (position, positions) that returns the parent, None for position 0, and the children."""


def family(placement: Placement, variant: str) -> Family:
    """Return the tree with near ranks below each other, so that few messages leave a node and a supernode."""
    order, links = locality_order(placement), {"": _binomial, "binary": _halves, "star": _star}[variant]
    allreduce, *one_way = (renumber(partial(make, links=links), order) for make in (tree, broadcast, reduce))
    return Family(allreduce, None, None, *one_way)


def worth(_: str, __: Placement, variant: str) -> bool:
    """Return True for few messages, which is good for short payloads on any placement; a variant sends as many."""
    return not variant


def _binomial(position: int, positions: int) -> tuple[int | None, list[int]]:
    return parent(position) if position else None, children(position, positions)


def _star(position: int, positions: int) -> tuple[int | None, list[int]]:
    return (0, []) if position else (None, [*range(1, positions)])


def _halves(position: int, positions: int) -> tuple[int | None, list[int]]:
    above: int | None = None
    first, end = 0, positions
    while True:
        middle = first + 1 + (end - first - 1) // 2
        if first == position:
            return above, [child for child, last in ((middle, end), (first + 1, middle)) if child < last]
        above, first, end = first, *((first + 1, middle) if position < middle else (middle, end))


def broadcast(rank: int, ranks: int, links: Links = _binomial) -> Program:
    """Return a broadcast from rank 0 down the tree. log2 p steps, p-1 messages in all."""
    return Program(1, (down(*links(rank, ranks)),))


def reduce(rank: int, ranks: int, links: Links = _binomial) -> Program:
    """Return a reduction up the tree to rank 0. log2 p steps, p-1 messages in all."""
    return Program(1, (up(*links(rank, ranks)),), max(1, len(links(0, ranks)[1])))


def tree(rank: int, ranks: int, links: Links = _binomial) -> Program:
    """Return an allreduce: `reduce`, then `broadcast`."""
    return Program(1, (up(*links(rank, ranks)) + down(*links(rank, ranks)),), max(1, len(links(0, ranks)[1])))


def up(above: int | None, below: list[int], chunk: int = 0) -> Lane:
    """Return a rank's rounds of a reduction: it sums from its children, and sends the sum to its parent."""
    rounds: Lane = (tuple(add(child, chunk) for child in below),) if below else ()
    return rounds if above is None else (*rounds, (send(above, chunk),))


def down(above: int | None, below: list[int], chunk: int = 0) -> Lane:
    """Return a rank's rounds of a broadcast: it receives from its parent, and sends to its children."""
    rounds: Lane = (tuple(send(child, chunk) for child in below),) if below else ()
    return rounds if above is None else ((receive(above, chunk),), *rounds)


def parent(position: int) -> int:
    """Return the parent of a position other than 0."""
    return position & (position - 1)


def children(position: int, positions: int) -> list[int]:
    """Return the children of a position, those with the most positions below them first."""
    lowest = position & -position or positions
    distances = [1 << bit for bit in reversed(range(positions.bit_length())) if 1 << bit < lowest]
    return [position + distance for distance in distances if position + distance < positions]
