"""Memory that the MPI library moves as it is; CPU tensors take the place of a GPU's, as it sees only addresses."""

from __future__ import annotations

import pytest
import torch

from unisono.collectives.direct import (
    VARIABLE,
    all_gather_direct,
    allreduce_direct,
    broadcast_direct,
    mpi_reports_gpu_support,
    reaches,
    reduce_scatter_direct,
)
from unisono.collectives.group import Group
from unisono.errors import MismatchError, UsageError
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
        allreduce_direct(group, tensor, op)
        every = torch.stack([of_rank(rank, 5, dtype) for rank in range(world.size)])
        torch.testing.assert_close(tensor, combine(every, 0, dtype=dtype))


def test_reduce_scatter(world: World, group: Group) -> None:
    tensor, part = own(world, 3 * world.size, torch.float32), torch.empty(3)
    reduce_scatter_direct(group, tensor, part, "sum")
    total = sum(of_rank(rank, 3 * world.size, torch.float32) for rank in range(world.size))
    torch.testing.assert_close(part, total.view(world.size, 3)[world.rank])


def test_broadcast(world: World, group: Group) -> None:
    for root in range(world.size):
        tensor = own(world, 7, torch.bfloat16)
        broadcast_direct(group, tensor, root)
        torch.testing.assert_close(tensor, of_rank(root, 7, torch.bfloat16))


def test_all_gather(world: World, group: Group) -> None:
    out = torch.empty(4 * world.size, dtype=torch.float16)
    all_gather_direct(group, own(world, 4, torch.float16), out)
    torch.testing.assert_close(out, torch.cat([of_rank(rank, 4, torch.float16) for rank in range(world.size)]))


def test_sixteen_bits_round_the_parts_and_their_sum(world: World, group: Group) -> None:
    tensor = own(world, 1001, torch.float32)
    allreduce_direct(group, tensor, "sum", "bfloat16")
    parts = [of_rank(rank, 1001, torch.float32).bfloat16().float() for rank in range(world.size)]
    torch.testing.assert_close(tensor, sum(parts).bfloat16().float(), rtol=0, atol=0)


def test_half_precision_is_summed_in_float32(world: World, group: Group) -> None:
    tensor = own(world, 77, torch.float16) / 7
    parts = [(of_rank(rank, 77, torch.float16) / 7).float() for rank in range(world.size)]
    allreduce_direct(group, tensor, "sum")
    torch.testing.assert_close(tensor, sum(parts).half(), rtol=0, atol=0)


def test_no_device_is_tried_that_the_library_does_not_move(world: World, group: Group) -> None:
    def staged(_: torch.Tensor) -> None:
        raise AssertionError("nothing is timed")

    if not mpi_reports_gpu_support():
        assert not reaches(group, torch.device("cuda"), staged)
    assert not reaches(group, torch.device("xpu"), staged)


def test_mismatched_calls_are_reported(world: World, group: Group) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(MismatchError):
        allreduce_direct(group, own(world, 5 + (world.rank == 1), torch.float32), "sum")


def test_a_library_without_gpus_does_not_claim_them() -> None:
    assert mpi_reports_gpu_support() in (True, False)
    if not torch.cuda.is_available():
        assert not mpi_reports_gpu_support(), "a library that was built for GPUs, on a machine without"


def test_a_transport_that_is_asked_for(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: torch.Tensor) -> None:
        pytest.fail("nothing is timed")

    device = torch.device("meta")
    monkeypatch.setenv(VARIABLE, "staged")
    assert not reaches(group, device, never)
    group.reached.clear()
    monkeypatch.setenv(VARIABLE, "direct")
    with pytest.raises(UsageError, match=r"direct: .* does not move memory of meta rightly here; take a library"):
        reaches(group, device, never)
    monkeypatch.setenv(VARIABLE, "nccl")
    with pytest.raises(UsageError, match='is "nccl"; set it to "staged" or "direct", or unset it'):
        reaches(group, device, never)
