"""The rows of an exchange, and those that are nearest to one that was not measured."""

from __future__ import annotations

from unisono.plan.collective_rows import nearest_rows, rows_of
from unisono.plan.measured_rows import CollectiveRow


def row(nodes: int, ranks: int, wire: str = "float32", nbytes: int = 1 << 20) -> CollectiveRow:
    return CollectiveRow("allreduce", "ring", wire, nodes, ranks, nbytes, 0.1, 0.0)


def test_rows_are_those_of_the_same_exchange_by_rising_bytes() -> None:
    small, large = row(2, 2, nbytes=8), row(2, 2, nbytes=16)
    others = [row(2, 2, "bfloat16"), row(2, 4), row(4, 4)]
    assert rows_of([large, *others, small], "allreduce", "float32", 2, 2) == [small, large]
    assert rows_of([large, small], "all_gather", "float32", 2, 2) == []


def test_the_worked_example() -> None:
    rows = [row(2, 2), row(2, 2, "bfloat16"), row(1, 2)]
    assert nearest_rows(rows, "allreduce", 0.5, 8, 8) == [rows[1]]
    assert nearest_rows(rows, "allreduce", 1.0, 8, 8) == [rows[0]]
    assert nearest_rows(rows[2:], "allreduce", 1.0, 8, 8) == []


def test_bytes_on_the_wire_come_before_nodes_and_these_before_ranks_of_a_node() -> None:
    near, far, dense = row(4, 4, "bfloat16"), row(2, 2), row(4, 8)
    assert nearest_rows([near, far], "allreduce", 1.0, 4, 4) == [far]
    assert nearest_rows([far, dense], "allreduce", 1.0, 4, 4) == [dense]
    assert nearest_rows([dense, row(4, 4)], "allreduce", 1.0, 4, 4) == [row(4, 4)]
    assert nearest_rows([row(8, 8), row(2, 2)], "allreduce", 1.0, 4, 4) == [row(2, 2)]
    assert nearest_rows([row(2, 2)], "all_gather", 1.0, 4, 4) == []
