"""PyTorch's reductions in terms of ours."""

import pytest
import torch
import torch.distributed as dist

from unisono.errors import TensorError
from unisono.torch_backend.reductions import NAMES, reduction_of


def test_every_reduction_of_pytorch_is_known() -> None:
    known = {name for name in dist.ReduceOp.RedOpType.__members__ if name != "UNUSED"}
    assert {kind.name for kind in NAMES} == known


def test_averages_divide_afterwards() -> None:
    average = reduction_of(dist.ReduceOp.AVG)
    for tensor, expected in [(torch.tensor([6.0]), 1.5), (torch.tensor([-7]), -1)]:
        average.after(tensor, 4)
        assert tensor.item() == expected


def test_factors_leave_a_source_alone() -> None:
    reduction = reduction_of(dist._make_nccl_premul_sum(3.0))
    tensor = torch.ones(2)
    assert reduction.before(tensor, copy=True).tolist() == [3, 3]
    assert tensor.tolist() == [1, 1]
    assert reduction.before(tensor, copy=False) is tensor
    assert tensor.tolist() == [3, 3]


def test_unknown_reductions_are_refused() -> None:
    with pytest.raises(TensorError, match="SUM, AVG"):
        reduction_of("median")
