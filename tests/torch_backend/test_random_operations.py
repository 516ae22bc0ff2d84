"""Random operations on random subsets of four ranks, many in flight; the same program does 10,000 for the record."""

from __future__ import annotations


def test_random_operations(four_ranks: dict[str, str]) -> None:
    assert four_ranks["random_operations.py"].startswith("400 operations are right")
