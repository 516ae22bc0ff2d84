"""Rows of measured collectives that stand for an exchange: its own, or the nearest ones, which correct an estimate.

    wanted: allreduce, bfloat16, 8 nodes x 1 rank       rows: 2 nodes, float32     further: other bytes on the wire
                                                              2 nodes, bfloat16    nearest
                                                              1 node,  float32     none: it has no link

Nearest is first by the bytes on the wire, then by the number of nodes, then by the ranks of a node; all by ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from unisono.plan.measured_rows import CollectiveRow
from unisono.wires import encoded_share


def rows_of(rows: Sequence[CollectiveRow], collective: str, wire: str, nodes: int, ranks: int) -> list[CollectiveRow]:
    """Return the rows of this exchange by rising bytes; empty if it was not measured."""
    wanted = (collective, wire, nodes, ranks)
    found = [row for row in rows if (row.collective, row.wire, row.nodes, row.ranks) == wanted]
    return sorted(found, key=lambda row: row.bytes)


def nearest_rows(
    rows: Sequence[CollectiveRow], collective: str, share: float, nodes: int, ranks: int
) -> list[CollectiveRow]:
    """Return the rows of the nearest exchange between nodes, by rising bytes; empty if there is none.

    `share` is the encoded size of what is sent, relative to float32. Of equally near ones, fewer nodes are taken.
    """

    def distance(row: CollectiveRow) -> tuple[float, float, float, int]:
        of_wire, each = encoded_share(row.wire) / share, row.ranks / row.nodes
        return abs(log(of_wire)), abs(log(row.nodes / nodes)), abs(log(each * nodes / ranks)), row.nodes

    between = [row for row in rows if row.collective == collective and row.nodes > 1]
    if not between:
        return []
    nearest = min(between, key=distance)
    return rows_of(rows, collective, nearest.wire, nearest.nodes, nearest.ranks)
