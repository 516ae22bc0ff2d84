"""One leader per node: it sums the payloads of its node, runs a schedule with the other leaders, and sends the result.

    node 0   rank 0 ◀─ rank 1      sums          rank 0 ─▶ rank 1      gives back
               ║                                   ║
    node 1   rank 2 ◀─ rank 3                    rank 2 ─▶ rank 3

4 ranks on 2 nodes, `tree` between the leaders (`0→2` sends chunk 0 to rank 2, `+0←3` sums it into place, `0←3`
replaces):

            round 0  round 1  round 2  round 3
    rank 0  +0←1     +0←2     0→2      0→1
    rank 1  0→0      0←0
    rank 2  +0←3     0→0      0←0      0→3
    rank 3  0→2      0←2

Rounds: 2 more than the schedule between the nodes. Bytes: the leader of a node of k receives n(k-1) and sends as many;
the link of a node carries the bytes of one rank of the schedule between nodes. It is `hierarchical` with one column:
fewer messages for a node's processor and link, so better for short payloads. Columns share the work of long ones.
Source: DIMD, which sums the GPUs of a node so before its trees between nodes.
"""

from __future__ import annotations

from unisono.placement import Placement
from unisono.schedules.hierarchical import hierarchical
from unisono.schedules.schedule import Family

BETWEEN = "tree"
"""Default schedule between the nodes."""


def family(placement: Placement, between: Family) -> Family:
    """Return the schedule for this placement, with `between` among the leaders. It cannot be renumbered."""
    return Family(hierarchical(placement, between.allreduce, width=1))
