"""Circulant: sums to their owners and back in log2 p rounds each, for any number of ranks and the fewest bytes.

    all-gather, 5 ranks: in each round a rank takes as many chunks as it has, from the rank that far ahead

    rank 0   | 0 |     ◀─ 1     | 0 1 |     ◀─ 2     | 0 1 2 3 |     ◀─ 4     | 0 1 2 3 4 |

The reduce-scatter is the same backwards: a rank sends away what it would have taken, and sums what it would have sent.

4 ranks (`2-3→2` sends chunks 2 and 3 to rank 2, `+0-1←2` sums them into place, `2-3←2` replaces):

            round 0       round 1   round 2  round 3
    rank 0  2-3→1 +0-1←1  1→2 +0←2  0→2 1←2  0-1→1 2-3←1
    rank 1  0-1→0 +2-3←0  3→3 +2←3  2→3 3←3  2-3→0 0-1←0
    rank 2  2-3→3 +0-1←3  0→0 +1←0  1→0 0←0  0-1→3 2-3←3
    rank 3  0-1→2 +2-3←2  2→1 +3←1  3→1 2←1  2-3→2 0-1←2

Where p is a power of two, as here, partners exchange: a pair waits for each other once a round. The largest messages
go between neighbours, which often share a switch. For other p, a range of chunks that goes beyond the last one is two
transfers.

Rounds: 2 ceil(log2 p). Bytes sent by each rank: 2n(p-1)/p. Used for short payloads, whose time is that of their rounds.

A broadcast sends each rank its chunk down the tree, and then gathers; a reduction is that backwards. Rounds: up to
2 ceil(log2 p). Bytes sent by the root: 2n(p-1)/p, where the tree sends n log2 p.

An all-to-all hands chunks on. 4 ranks; from rank 0 chunk 3 goes a distance of 3 = 1 + 2, chunk 1 of 1, chunk 2 of 2:

            round 0           round 1
    rank 0  1→1 3→1 7←3 15←3  2→2 15→2 6←2 5←2
    rank 1  2→2 0→2 4←0 15←0  3→3 15→3 7←3 6←3
    rank 2  3→3 1→3 5←1 15←1  0→0 15→0 4←0 7←0
    rank 3  0→0 2→0 6←2 15←2  1→1 15→1 5←1 4←1

Chunk 15, of the distance 3, is on its way; chunk 4 + s came from rank s. Through sockets, what goes to one rank in a
round is one message. Rounds: ceil(log2 p), where `direct` sends p-1 messages. Bytes sent by each rank: up to
n/2 ceil(log2 p).
Source: Träff, 2023; Bruck and others, 1997; van de Geijn, 1994.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unisono.placement import Placement
from unisono.schedules.numbering import renumber
from unisono.schedules.schedule import Family, Lane, Program, Round, Transfer, add, receive, send
from unisono.schedules.tree import children, parent


def family(placement: Placement, _: str) -> Family:
    """Return the schedules. Where no rank owns a chunk of its number, the large messages go to the nearest ranks."""
    order = nearest_first(placement.ranks)
    allreduce, from_root, to_root = (renumber(algorithm, order) for algorithm in (circulant, broadcast, reduce))
    return Family(allreduce, reduce_scatter, all_gather, from_root, to_root, all_to_all)


def nearest_first(ranks: int) -> list[int]:
    """Return the ranks in positions whose partners of large messages, half of the positions away, are next to them.

    Ranks that are next to each other often share a switch. Only powers of two have such an order, by reversed bits.

    >>> nearest_first(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = (ranks - 1).bit_length()
    if ranks & (ranks - 1):
        return list(range(ranks))
    return [sum((position >> bit & 1) << (bits - 1 - bit) for bit in range(bits)) for position in range(ranks)]


def circulant(rank: int, ranks: int) -> Program:
    """Return an allreduce: `reduce_scatter`, then `all_gather`."""
    return Program(ranks, (_collect(rank, ranks) + _give(rank, ranks),), _landing(ranks))


def reduce_scatter(rank: int, ranks: int) -> Program:
    """Return a reduce-scatter: rank r ends with the sum of chunk r. ceil(log2 p) rounds, n(p-1)/p bytes sent."""
    return Program(ranks, (_collect(rank, ranks),), _landing(ranks))


def all_gather(rank: int, ranks: int) -> Program:
    """Return an all-gather of chunk r from each rank r. ceil(log2 p) rounds, n(p-1)/p bytes sent by each rank."""
    return Program(ranks, (_give(rank, ranks),))


def broadcast(rank: int, ranks: int) -> Program:
    """Return a broadcast from rank 0: chunk r to each rank r, then an all-gather."""
    below = tuple(send(child, child, _below(child, ranks)) for child in children(rank, ranks))
    above: Lane = ((receive(parent(rank), rank, _below(rank, ranks)),),) if rank else ()
    return Program(ranks, ((*above, *((below,) if below else ()), *_give(rank, ranks)),))


def reduce(rank: int, ranks: int) -> Program:
    """Return a reduction to rank 0: a reduce-scatter, then chunk r from each rank r."""
    below = tuple(receive(child, child, _below(child, ranks)) for child in children(rank, ranks))
    above: Lane = ((send(parent(rank), rank, _below(rank, ranks)),),) if rank else ()
    return Program(ranks, ((*_collect(rank, ranks), *((below,) if below else ()), *above),), _landing(ranks))


def all_to_all(rank: int, ranks: int) -> Program:
    """Return an all-to-all: a chunk goes the powers of two that make up the distance from its sender, the least first.

    ceil(log2 p) rounds, up to n/2 bytes sent in each by each rank.
    """

    def turn(bit: int) -> Round:
        step, moved = 1 << bit, [distance for distance in range(ranks) if distance >> bit & 1]
        ahead, behind = (rank + step) % ranks, (rank - step) % ranks
        sends = (send(ahead, _place(rank, ranks, distance, distance % step)) for distance in moved)
        return (*sends, *(receive(behind, _place(rank, ranks, distance, distance % (2 * step))) for distance in moved))

    return Program(4 * ranks, (tuple(turn(bit) for bit in range((ranks - 1).bit_length())),))


def _place(rank: int, ranks: int, distance: int, gone: int) -> int:
    """Return the chunk in which a rank has what goes a distance, once it has gone so much of it.

    On its way it changes between two places, since one is sent while the other is received.
    """
    if gone in (0, distance):
        return ranks + (rank - distance) % ranks if gone else (rank + distance) % ranks
    return (2 + gone.bit_count() % 2) * ranks + distance


def _below(position: int, positions: int) -> int:
    """Return the number of positions of the tree at and below one."""
    return min(positions - position, position & -position)


def _steps(ranks: int) -> list[tuple[int, int]]:
    """Return the rounds of an all-gather: the distance to the rank ahead, and the number of chunks taken from there.

    >>> _steps(7)
    [(1, 1), (2, 2), (4, 3)]
    """
    distances = [1 << bit for bit in range((ranks - 1).bit_length())]
    return [(distance, min(distance, ranks - distance)) for distance in distances]


def _landing(ranks: int) -> int:
    return max((count for _, count in _steps(ranks)), default=1)


def _give(rank: int, ranks: int, backwards: bool = False) -> Lane:
    """Return the rounds of an all-gather; `backwards`, they are those of the reduce-scatter."""

    def turn(distance: int, count: int) -> Round:
        """`given` and `taken` are a partner, and the first of the chunks that go to it or come from it."""
        behind, ahead = (rank - distance) % ranks, (rank + distance) % ranks
        given, taken = (behind, rank), (ahead, ahead)
        if not ranks & (ranks - 1):
            partner = rank ^ distance
            given, taken = (partner, rank & -distance), (partner, partner & -distance)
        if backwards:
            return (*_range(send, *taken, count, ranks), *_range(add, *given, count, ranks))
        return (*_range(send, *given, count, ranks), *_range(receive, *taken, count, ranks))

    steps = _steps(ranks)
    return tuple(turn(*step) for step in (reversed(steps) if backwards else steps))


def _collect(rank: int, ranks: int) -> Lane:
    return _give(rank, ranks, backwards=True)


def _range(
    make: Callable[[int, int, int], Transfer], peer: int, first: int, count: int, chunks: int
) -> Iterator[Transfer]:
    """Yield the transfers of `count` chunks from `first` on; chunk 0 follows the last one."""
    within = min(count, chunks - first)
    yield make(peer, first, within)
    if within < count:
        yield make(peer, 0, count - within)
