"""Operations that may be passed directly to a CUDA-aware MPI library."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unisono.torch_backend.direct import can_pass_directly


def options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    chosen = dist.AllreduceOptions()
    chosen.reduceOp = dist.ReduceOp(op)
    return chosen


def test_plain_tensors_of_dtypes_known_to_mpi() -> None:
    assert can_pass_directly("allreduce", ([torch.ones(3)],))
    assert can_pass_directly("allreduce", ([torch.ones(3)], options(dist.ReduceOp.AVG)))
    assert can_pass_directly("reduce_scatter_single", (torch.ones(1), torch.ones(3)))


@pytest.mark.parametrize("name", ["broadcast", "all_gather_single"])
def test_any_dtype_without_a_reduction(name: str) -> None:
    assert can_pass_directly(name, (torch.ones(3, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bool)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool])
def test_sums_of_dtypes_unknown_to_mpi_are_staged(dtype: torch.dtype) -> None:
    assert not can_pass_directly("allreduce", ([torch.ones(3, dtype=dtype)],))


def test_minimum_and_maximum_are_staged() -> None:
    """MPI may take either of a NaN and a number."""
    assert not can_pass_directly("allreduce", ([torch.ones(3)], options(dist.ReduceOp.MIN)))


def test_non_contiguous_tensors_are_staged() -> None:
    assert not can_pass_directly("broadcast", ([torch.ones(3, 4).t()],))
    assert not can_pass_directly("allreduce", ([torch.ones(3, 4)[:, 1]],))
    assert not can_pass_directly("allreduce", ([torch.ones(3).to_sparse()],))
    assert not can_pass_directly("broadcast", ([torch.ones(3, dtype=torch.complex64).conj()],))
