"""As many trees as colors, a chunk each; no rank has children in two of them, so sums and wires are shared evenly.

    4 colors on 8 ranks (DIMD, figure 2); ranks 0 and 1 have children in color 0 only, 2 and 3 in color 1 only, ...

        color 0           color 1           color 2           color 3
        0                 2                 4                 6
        ├── 1 ─┬─ 5       ├── 3 ─┬─ 7       ├── 5 ─┬─ 1       ├── 7 ─┬─ 3
        ├── 2  ├─ 6       ├── 4  ├─ 0       ├── 6  ├─ 2       ├── 0  ├─ 4
        ├── 3  └─ 7       ├── 5  └─ 1       ├── 7  └─ 3       ├── 1  └─ 5
        └── 4             └── 6             └── 0             └── 2

Each chunk is summed up its tree to the root and given back down it; each tree has a lane of its own, and the pieces
follow one another in it. 4 ranks (`2→1` sends chunk 2 to rank 1, `+2←3` sums it into place, `2←3` replaces):

    lane 0
            round 0         round 1
    rank 0  +0←1 +0←2 +0←3  0→1 0→2 0→3
    rank 1  0→0             0←0
    rank 2  0→0             0←0
    rank 3  0→0             0←0

    lane 1
            round 0         round 1
    rank 0  1→1             1←1
    rank 1  +1←2 +1←3 +1←0  1→2 1→3 1→0
    rank 2  1→1             1←1
    rank 3  1→1             1←1

    lane 2
            round 0         round 1
    rank 0  2→2             2←2
    rank 1  2→2             2←2
    rank 2  +2←3 +2←0 +2←1  2→3 2→0 2→1
    rank 3  2→2             2←2

    lane 3
            round 0         round 1
    rank 0  3→3             3←3
    rank 1  3→3             3←3
    rank 2  3→3             3←3
    rank 3  +3←0 +3←1 +3←2  3→0 3→1 3→2

A tree of arity k over p ranks, filled row by row, has ceil((p-1)/k) ranks with children. k of them fit side by side if
p leaves 0 or 1 when divided by k; else the most colors below k that fit are taken. Two always fit, and with as many
colors as ranks each tree is a star, and the whole is `direct` without its common rounds.

Rounds: up to 4 in each lane; 2 log_k p steps for one piece. Bytes sent by each rank: up to 2n.
Source: DIMD section 4.2.
"""

from unisono.placement import Placement
from unisono.schedules.numbering import neighbours, renumber
from unisono.schedules.schedule import Algorithm, Family, Lane, Program, Round, add, receive, send

COLORS = 4
"""What DIMD uses."""

VARIANTS = ("2", "8")
"""Other numbers of colors."""


def family(placement: Placement, variant: str) -> Family:
    """Inner ranks of a tree follow one another, so that they are near each other (DIMD section 4.2)."""
    return Family(renumber(multicolor(int(variant or COLORS)), neighbours(placement)))


def worth(_: str, placement: Placement, variant: str) -> bool:
    """Between ranks that are alone on their nodes, with as many colors as DIMD has."""
    return placement.ranks == len(placement.nodes) and not variant


def multicolor(most: int) -> Algorithm:
    """The allreduce with at most `most` colors."""

    def algorithm(rank: int, ranks: int) -> Program:
        colors = fitting(most, ranks)
        lanes = tuple(_lane(rank, ranks, color, colors) for color in range(colors))
        return Program(colors, lanes, max(1, min(colors, ranks - 1)))

    return algorithm


def fitting(most: int, ranks: int) -> int:
    """The largest number of colors, up to `most`, of which no two have a rank with children in common."""
    return max(colors for colors in range(1, min(most, ranks) + 1) if colors * _inner(ranks, colors) <= ranks)


def _inner(ranks: int, colors: int) -> int:
    """How many ranks of one tree have children."""
    return -(-(ranks - 1) // colors)


def _lane(rank: int, ranks: int, color: int, colors: int) -> Lane:
    """One rank's part in one tree: place 0 is the root, those with children come next, then the leaves."""
    root = color * _inner(ranks, colors)
    place = (rank - root) % ranks
    first = colors * place + 1
    children = [(root + child) % ranks for child in range(first, min(first + colors, ranks))]
    parent = (root + (place - 1) // colors) % ranks
    collect: Lane = (tuple(add(child, color) for child in children),) if children else ()
    climb: tuple[Round, ...] = ((send(parent, color),), (receive(parent, color),)) if place else ()
    give: Lane = (tuple(send(child, color) for child in children),) if children else ()
    return collect + climb + give
