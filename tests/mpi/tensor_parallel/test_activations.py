"""Each collective on activations is what a whole tensor would give, and its backward pass is its transpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from unisono.tensor_parallel.activations import (
    copy_to_group,
    cut_own_part,
    gather_parts,
    gather_to_group,
    scatter_sum,
    sum_over_group,
)
from unisono.world import World

Function = Callable[[torch.Tensor, World], torch.Tensor]


def own(seed: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_what_each_gives(group: World, dim: int) -> None:
    p, rank = group.size, group.rank
    shape = [2, 3, 4]
    shape[dim] *= p
    wholes = [own(1, one, *shape) for one in range(p)]
    mine, total = wholes[rank], sum(wholes)
    part = slice(rank * shape[dim] // p, (rank + 1) * shape[dim] // p)

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return whole.movedim(dim, 0)[part].movedim(0, dim)

    torch.testing.assert_close(sum_over_group(mine, group), total)
    torch.testing.assert_close(scatter_sum(mine, group, dim), cut(total))
    assert torch.equal(copy_to_group(mine, group), mine)
    assert torch.equal(cut_own_part(wholes[0], group, dim), cut(wholes[0]))
    for gather in (gather_parts, gather_to_group):
        assert torch.equal(gather(cut(wholes[0]), group, dim), wholes[0])


@pytest.mark.parametrize(
    ("function", "takes", "gives"),
    [
        (copy_to_group, "whole", "own"),
        (sum_over_group, "own", "whole"),
        (gather_parts, "part", "whole"),
        (cut_own_part, "whole", "part"),
        (gather_to_group, "part", "own"),
        (scatter_sum, "own", "part"),
    ],
)
def test_the_backward_pass_is_the_transpose(group: World, function: Function, takes: str, gives: str) -> None:
    """<f(x), y> = <x, f'(y)>: what is whole counts once, what is a rank's own or its part is summed over the ranks."""
    lengths = {"whole": 4 * group.size, "own": 4 * group.size, "part": 4}
    x, y = (
        own(seed, 0 if flow == "whole" else group.rank, 3, lengths[flow]) for seed, flow in ((1, takes), (2, gives))
    )
    x.requires_grad_()
    out = function(x, group)
    out.backward(y)
    assert x.grad is not None

    def product(one: torch.Tensor, other: torch.Tensor, flow: str) -> float:
        found = (one * other).sum().detach()
        return float(found if flow == "whole" else group.allreduce(found.clone()))

    assert product(out, y, gives) == pytest.approx(product(x, x.grad, takes), rel=1e-12)


def test_a_rank_group_without_samples(group: World) -> None:
    for function, shape in ((sum_over_group, (0, 4)), (gather_parts, (0, 4)), (scatter_sum, (0, 4 * group.size))):
        assert len(function(torch.zeros(shape), group)) == 0
