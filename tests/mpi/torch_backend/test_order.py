"""Ranks of PyTorch in another order than MPI's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono  # noqa: F401 - registers the backend
from unisono.world import World


@pytest.mark.parametrize("order", ["backwards", "turned"])
def test_ranks_of_pytorch_in_another_order_than_mpi(world: World, tmp_path: Path, order: str) -> None:
    last, store = world.size - 1, world.call_on_root(lambda: tmp_path / "store")
    mine = last - world.rank if order == "backwards" else (world.rank + 1) % world.size
    dist.init_process_group("unisono", init_method=f"file://{store}", rank=mine, world_size=world.size)
    tensor = torch.full((2,), float(mine))
    dist.broadcast(tensor, last)
    assert tensor.tolist() == [last, last]
    parts = [None] * world.size
    dist.all_gather_object(parts, mine)
    assert parts == list(range(world.size))
    dist.destroy_process_group()
    dist.init_process_group("unisono")
    dist.barrier()
    dist.destroy_process_group()
