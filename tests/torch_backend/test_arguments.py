"""PyTorch's reductions in terms of ours; lists of tensors as one tensor with equal chunks, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono.errors import TensorError
from unisono.torch_backend import arguments
from unisono.torch_backend.arguments import REDUCTIONS, reduce_list, reduction_of, rows, spread, together

THREE: Any = SimpleNamespace(rank=0, size=3)


def test_rows_by_counts_and_in_equal_parts() -> None:
    tensor = torch.arange(12).view(6, 2)
    assert [len(part) for part in rows(THREE, tensor, [1, 0, 5])] == [1, 0, 5]
    assert [len(part) for part in rows(THREE, tensor, [])] == [2, 2, 2]


@pytest.mark.parametrize("counts", [[1, 2], [1, 2, 2], [7, 0, -1], [6, 6, 6]])
def test_rows_are_those_of_the_tensor(counts: list[int]) -> None:
    with pytest.raises(TensorError, match=r"rank 0: all_to_all of a tensor of shape \(6, 2\).* 6 together"):
        rows(THREE, torch.zeros(6, 2), counts)


def test_together_and_apart_again() -> None:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones(1, 4).t()]
    seen: list[int] = []

    def double(flat: torch.Tensor) -> None:
        seen.append(len(flat))
        flat.mul_(2)

    together(tensors, double)
    assert seen == [6, 3]
    assert all(bool((tensor == 2).all()) for tensor in tensors)


def test_parts_are_filled_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "all_gather", lambda _, lengths, known: known.copy_(lengths.expand_as(known)))
    output = torch.empty(2)

    def reduce(chunk: torch.Tensor, flat: torch.Tensor) -> None:
        assert flat.tolist() == [[1, 1, 0], [2, 2, 2]]
        chunk.copy_(flat[0])

    two: Any = SimpleNamespace(rank=0, size=2)
    reduce_list(two, output, [torch.ones(2), torch.full((3,), 2.0)], reduce)
    assert output.tolist() == [1, 1]


def test_spread_keeps_shapes() -> None:
    parts = [torch.empty(2, 2), torch.empty(1)]
    spread(torch.arange(5.0), parts)
    assert parts[0].tolist() == [[0, 1], [2, 3]]
    assert parts[1].tolist() == [4]


def test_every_reduction_of_pytorch_is_known() -> None:
    known = {name for name in dist.ReduceOp.RedOpType.__members__ if name != "UNUSED"}
    assert {kind.name for kind in REDUCTIONS} | {"PREMUL_SUM"} == known


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
