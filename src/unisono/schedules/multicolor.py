"""One tree and one chunk per color; no rank has children in two trees, so sums and links are used evenly.

    4 colors on 8 ranks (DIMD, figure 2); ranks 0 and 1 have children in color 0 only, 2 and 3 in color 1 only, ...

        color 0           color 1           color 2           color 3
        0                 2                 4                 6
        ├── 1 ─┬─ 5       ├── 3 ─┬─ 7       ├── 5 ─┬─ 1       ├── 7 ─┬─ 3
        ├── 2  ├─ 6       ├── 4  ├─ 0       ├── 6  ├─ 2       ├── 0  ├─ 4
        ├── 3  └─ 7       ├── 5  └─ 1       ├── 7  └─ 3       ├── 1  └─ 5
        └── 4             └── 6             └── 0             └── 2

Each chunk is summed up its tree to the root; the result is sent down it. Each tree is a separate lane, and the pieces
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

A tree of arity k over p ranks, filled row by row, has ceil((p-1)/k) ranks with children. k of these trees fit without a
common one if p mod k is 0 or 1; otherwise the largest number of colors below k that fits is used. Two always fit. With
as many colors as ranks each tree is a star, and the schedule is `direct` without its common rounds.

Rounds: up to 4 in each lane; 2 log_k p steps for one piece. Bytes sent by each rank: up to 2n.
Source: DIMD section 4.2.
"""

from unisono.placement import Placement
from unisono.schedules.numbering import locality_order, renumber
from unisono.schedules.schedule import Algorithm, Family, Lane, Program
from unisono.schedules.tree import down, up

COLORS = 4
"""Number of colors in DIMD."""

VARIANTS = ("2", "8")
"""Other numbers of colors."""


def family(placement: Placement, variant: str) -> Family:
    """Return the schedule with consecutive, hence near, ranks as the inner ranks of a tree (DIMD section 4.2)."""
    return Family(renumber(multicolor(int(variant or COLORS)), locality_order(placement)))


def worth(_: str, placement: Placement, variant: str) -> bool:
    """Return True for one rank per node, and the number of colors of DIMD."""
    return placement.ranks == len(placement.nodes) and not variant


def multicolor(most: int) -> Algorithm:
    """Return the allreduce with at most `most` colors."""

    def algorithm(rank: int, ranks: int) -> Program:
        colors = max_fitting_colors(most, ranks)
        lanes = tuple(_lane(rank, ranks, color, colors) for color in range(colors))
        return Program(colors, lanes, max(1, min(colors, ranks - 1)))

    return algorithm


def max_fitting_colors(most: int, ranks: int) -> int:
    """Return the largest number of colors, up to `most`, for which no rank has children in two trees."""
    return max(colors for colors in range(1, min(most, ranks) + 1) if colors * _inner(ranks, colors) <= ranks)


def _inner(ranks: int, colors: int) -> int:
    """Return the number of ranks with children in one tree."""
    return -(-(ranks - 1) // colors)


def _lane(rank: int, ranks: int, color: int, colors: int) -> Lane:
    """Return one rank's rounds in one tree: position 0 is the root, ranks with children are next, then the leaves."""
    root = color * _inner(ranks, colors)
    position = (rank - root) % ranks
    first = colors * position + 1
    children = [(root + child) % ranks for child in range(first, min(first + colors, ranks))]
    parent = (root + (position - 1) // colors) % ranks if position else None
    return up(parent, children, color) + down(parent, children, color)
