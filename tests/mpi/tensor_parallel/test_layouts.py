"""Each change of layout is what whole activations would give, and its backward pass is its transpose."""

from __future__ import annotations

import pytest
import torch

from unisono.errors import UsageError
from unisono.tensor_parallel.layouts import GroupLink, SampleNumbers, change_layout
from unisono.world import World

FEATURES = 3
"""Features of a rank's part."""


def drawn(seed: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def rows_of(group: World, even: bool) -> list[int]:
    """Samples of each rank; the last has none where they are uneven."""
    return [2 if even else group.size - 1 - rank for rank in range(group.size)]


@pytest.mark.parametrize("even", [True, False])
def test_what_each_gives(group: World, even: bool) -> None:
    p, rank, rows = group.size, group.rank, rows_of(group, even)
    link, width = GroupLink(group, SampleNumbers()), FEATURES * p
    owns = [drawn(1, rank, rows[rank], 2, width) for rank in range(p)]
    block = max(rows)
    mine, part = owns[rank], slice(rank * FEATURES, (rank + 1) * FEATURES)

    def own_rows(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor[at * block : at * block + rows[at]] for at in range(p)]

    full = change_layout(mine, link, "own", "whole")
    assert len(full) == p * block
    assert link.rows == rows
    assert all(torch.equal(actual, own) for actual, own in zip(own_rows(full), owns, strict=True))
    features = change_layout(mine, link, "own", "part")
    assert all(torch.equal(actual, own[..., part]) for actual, own in zip(own_rows(features), owns, strict=True))
    assert torch.equal(change_layout(features, link, "part", "own"), mine)
    assert torch.equal(change_layout(features, link, "part", "whole"), full)
    partials = [drawn(2, rank, p * block, 2, width) for rank in range(p)]
    own, inside = (change_layout(partials[rank], link, "partial", after) for after in ("own", "part"))
    torch.testing.assert_close(own, own_rows(sum(partials))[rank])
    torch.testing.assert_close(inside, sum(partials)[..., part])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("through", ["whole", "part"])
def test_gradients_inside_are_those_of_the_groups_mean_and_outside_those_of_own_losses(
    group: World, through: str, weighted: bool
) -> None:
    """x ─ group ─ times a weight ─ x again, with uneven samples, the last rank without any."""
    rows, link = rows_of(group, False), GroupLink(group, SampleNumbers())
    weights = [float(count) for count in rows] if weighted else [1.0] * group.size
    link.weigh_by(lambda: (3, weights[group.rank]))
    xs, ys = ([drawn(seed, rank, rows[rank], FEATURES * group.size) for rank in range(group.size)] for seed in (1, 2))
    x, factor = xs[group.rank].requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    if through == "whole":
        out = change_layout(change_layout(x, link, "own", "whole") * factor / group.size, link, "partial", "own")
    else:
        out = change_layout(change_layout(x, link, "own", "part") * factor, link, "part", "own")
    torch.testing.assert_close(out, 2 * x)
    out.backward(ys[group.rank])
    torch.testing.assert_close(x.grad, (2 * ys[group.rank]) * bool(weights[group.rank]))
    inside, total = group.allreduce(factor.grad.clone()), sum(weights)
    expected = sum(weight * (own * y).sum() for weight, own, y in zip(weights, xs, ys, strict=True))
    torch.testing.assert_close(inside, expected.detach() / total if total else torch.zeros_like(inside))


@pytest.mark.parametrize(("before", "after"), [("part", "whole"), ("partial", "part")])
def test_the_backward_pass_is_the_transpose(group: World, before: str, after: str) -> None:
    """<f(x), y> = <x, f'(y)>, summed over the ranks."""
    link, wide = GroupLink(group, SampleNumbers()), FEATURES * group.size
    takes, gives = (FEATURES, wide) if before == "part" else (wide, FEATURES)
    x, y = drawn(1, group.rank, 4, takes).requires_grad_(), drawn(2, group.rank, 4, gives)
    out = change_layout(x, link, before, after)
    out.backward(y)
    assert x.grad is not None
    forward, backward = (out * y).sum().detach().clone(), (x * x.grad).sum().detach().clone()
    assert float(group.allreduce(forward)) == pytest.approx(float(group.allreduce(backward)), rel=1e-12)


def test_an_activation_whose_samples_were_moved_is_refused(group: World) -> None:
    link = GroupLink(group, SampleNumbers())
    full = change_layout(torch.zeros(2, 4), link, "own", "whole")
    with pytest.raises(UsageError, match="keep samples in the first dimension"):
        change_layout(full.view(-1, 2), link, "partial", "own")
