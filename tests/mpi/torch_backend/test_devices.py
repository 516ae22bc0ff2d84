"""Tensors passed directly to the MPI library; CPU tensors take the place of GPU tensors, as it sees only addresses."""

from __future__ import annotations

import pytest
import torch

from unisono.collectives.group import Group
from unisono.errors import MismatchError
from unisono.torch_backend.devices import (
    all_gather_directly,
    allreduce_directly,
    broadcast_directly,
    gpu_sum_works,
    mpi_reports_gpu_support,
    reduce_scatter_directly,
)
from unisono.world import World


@pytest.fixture
def group(world: World) -> Group:
    return Group(world.comm, world.placement, world.table)


def own(world: World, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(length).to(dtype) + world.rank + 1


def of_rank(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(length).to(dtype) + rank + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_allreduce(world: World, group: Group, dtype: torch.dtype) -> None:
    for op, combine in {"sum": torch.sum, "product": torch.prod}.items():
        tensor = own(world, 5, dtype)
        allreduce_directly(group, tensor, op)
        every = torch.stack([of_rank(rank, 5, dtype) for rank in range(world.size)])
        torch.testing.assert_close(tensor, combine(every, 0, dtype=dtype))


def test_reduce_scatter(world: World, group: Group) -> None:
    tensor, part = own(world, 3 * world.size, torch.float32), torch.empty(3)
    reduce_scatter_directly(group, tensor, part, "sum")
    total = sum(of_rank(rank, 3 * world.size, torch.float32) for rank in range(world.size))
    torch.testing.assert_close(part, total.view(world.size, 3)[world.rank])


def test_broadcast(world: World, group: Group) -> None:
    for root in range(world.size):
        tensor = own(world, 7, torch.bfloat16)
        broadcast_directly(group, tensor, root)
        torch.testing.assert_close(tensor, of_rank(root, 7, torch.bfloat16))


def test_all_gather(world: World, group: Group) -> None:
    out = torch.empty(4 * world.size, dtype=torch.float16)
    all_gather_directly(group, own(world, 4, torch.float16), out)
    torch.testing.assert_close(out, torch.cat([of_rank(rank, 4, torch.float16) for rank in range(world.size)]))


def test_the_probe_sums_on_all_ranks(world: World, group: Group) -> None:
    assert gpu_sum_works(group, torch.device("cpu"))


def test_mismatched_calls_are_reported(world: World, group: Group) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(MismatchError):
        allreduce_directly(group, own(world, 5 + (world.rank == 1), torch.float32), "sum")


def test_a_library_without_gpus_does_not_claim_them() -> None:
    assert mpi_reports_gpu_support() in (True, False)
    if not torch.cuda.is_available():
        assert not mpi_reports_gpu_support(), "a library that was built for GPUs, on a machine without"
