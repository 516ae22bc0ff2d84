"""Assignment of ranks to the positions of an algorithm: the placement depends on the network, the algorithm does not.

8 ranks in 2 supernodes, ranks 0-3 and 4-7:

    position                       0 1 2 3 4 5 6 7
    ranks in their order           0 1 2 3 4 5 6 7     distant positions are in different supernodes
    round-robin over supernodes    0 4 1 5 2 6 3 7     distant positions are in the same (swCaffe 5.1, figure 7)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unisono.placement import Placement
from unisono.schedules.schedule import Algorithm, Program, Transfer


def locality_order(placement: Placement) -> tuple[int, ...]:
    """Return the ranks by supernode, then node: a ring in this order enters and leaves each of them once."""
    nodes: Sequence[int] = range(len(placement.nodes))
    if placement.supernodes:
        nodes = sorted(nodes, key=placement.supernodes.__getitem__)  # stable: nodes of a supernode stay in their order
    return tuple(rank for node in nodes for rank in placement.nodes[node])


def round_robin(placement: Placement) -> tuple[int, ...]:
    """Return the ranks taken from the supernodes in turn: distant positions share a supernode (swCaffe 5.1).

    With several ranks per node, whole nodes are taken in turn: the first rank of each, then the second of each.
    """
    counts = Counter[int]()
    key: dict[int, tuple[int, int, int]] = {}
    for ranks in placement.nodes:
        supernode = placement.supernode_of(ranks[0])
        key |= {rank: (position, counts[supernode], supernode) for position, rank in enumerate(ranks)}
        counts[supernode] += 1
    return tuple(sorted(range(placement.ranks), key=key.__getitem__))


def suits_round_robin(placement: Placement, single: bool = False) -> bool:
    """Return True if round-robin numbering keeps the large messages of halving inside the supernodes.

    It does if the numbers of supernodes, of nodes in each and of ranks in each node are powers of two, and equal
    everywhere; `single` counts every node as one rank. Otherwise halving folds ranks of different supernodes together,
    and its halves cross them: on 4 times over-subscribed uplinks, 2 x 6, 3 x 4, 3 x 5, 5 x 4 and 6 x 8 hosts take 3 to
    7 times the bound of the links, a ring 1.0 to 1.2 times.
    """
    nodes = Counter(placement.supernodes).values()
    ranks = {1} if single else {len(node) for node in placement.nodes}
    even = len(set(nodes)) == 1 and len(ranks) == 1
    return even and all(count & (count - 1) == 0 for count in (len(nodes), *nodes, *ranks))


def renumber(algorithm: Algorithm, order: Sequence[int], chunks_too: bool = False) -> Algorithm:
    """Return the algorithm with rank `order[position]` in each position.

    `chunks_too` is for reduce_scatter and all_gather: a rank owns the chunk of its own number, not of its position.
    """
    if list(order) == list(range(len(order))):
        return algorithm
    position_of = {rank: position for position, rank in enumerate(order)}

    def moved(transfer: Transfer) -> Transfer:
        chunk = order[transfer.chunk] if chunks_too else transfer.chunk
        return transfer._replace(peer=order[transfer.peer], chunk=chunk)

    def renumbered(rank: int, ranks: int) -> Program:
        program = algorithm(position_of[rank], ranks)
        return program._replace(
            lanes=tuple(tuple(tuple(map(moved, transfers)) for transfers in lane) for lane in program.lanes)
        )

    return renumbered
