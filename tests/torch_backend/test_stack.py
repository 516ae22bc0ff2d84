"""What PyTorch builds on its collectives works over unisono: the program asserts it on every rank."""

from __future__ import annotations


def test_every_part(four_ranks: dict[str, str]) -> None:
    assert four_ranks["stack.py"].split() == ["join", "mesh_of_two_dimensions", "distributed_checkpoint", "objects"]
