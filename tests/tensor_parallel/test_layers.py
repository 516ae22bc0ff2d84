"""Parts of a weight are equal, and joined they are the weight: for any number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.tensor_parallel.layers import WeightPart


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 2))
def test_parts_are_equal_and_make_the_whole(ranks: int, length: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = length
    weight = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    parts = [WeightPart(ranks, member, dim, weight.shape) for member in range(ranks)]
    cut = [part.cut(weight) for part in parts]
    for piece in cut:
        assert piece.shape[dim] == -(-length // ranks)
    assert torch.equal(torch.cat(cut, dim).narrow(dim, 0, length), weight)
    assert sum(int((piece != 0).sum()) for piece in cut) == weight.numel()


def test_the_example() -> None:
    parts = [WeightPart(4, member, 0, torch.Size([10, 3])) for member in range(4)]
    assert [(part.start, part.size) for part in parts] == [(0, 3), (3, 3), (6, 3), (9, 3)]
