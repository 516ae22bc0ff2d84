"""Collectives on activations inside forward and backward passes (PCL-DNN section 3.4, Megatron-LM section 3).

    function              forward                             backward
    copy_to_group         x as it is                          allreduce: each rank has a part of the gradient's sum
    sum_over_group        allreduce                           gradient as it is
    gather_parts          all-gather of the ranks' parts      own part of the gradient
    cut_own_part          own part of x                       all-gather of the ranks' parts
    gather_to_group       all-gather                          reduce-scatter
    scatter_sum           reduce-scatter                      all-gather

    4 ranks, features 0 to 7     rank 0 has 0 1, rank 1 has 2 3, ...     gather_parts: 0 1 2 3 4 5 6 7 on each

Each pair is the other's transpose. What is whole is the same on all ranks of a group, and so is its gradient. A payload
of n bytes costs each of p ranks n (p - 1) / p sent bytes for an all-gather or a reduce-scatter, and twice that for an
allreduce. Calls of a group have a communicator of their own, so exchanges of gradients may run beside them, in any
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.tensor_parallel.times import ExchangeTimes
from unisono.world import World

Change = Callable[[Tensor, World, int], Tensor]
"""Function (activation, world of the group, dimension of the parts) -> activation."""


def same(x: Tensor, _: World, __: int) -> Tensor:
    """Return `x` as a tensor of its own, in the same memory."""
    return x.view_as(x)


def summed(x: Tensor, group: World, _: int) -> Tensor:
    """Return the sum of all ranks' `x`."""
    return group.allreduce(x.clone(memory_format=torch.contiguous_format))


def gathered(x: Tensor, group: World, dim: int) -> Tensor:
    """Return all ranks' `x`, one after another along `dim`, in the order of ranks."""
    parts = group.all_gather(x.contiguous(), x.new_empty((group.size, *x.shape)))
    return torch.cat(parts.unbind(), dim)


def own_part(x: Tensor, group: World, dim: int) -> Tensor:
    """Return this rank's part of `x`, one of equal parts along `dim`."""
    return x.chunk(group.size, dim)[group.rank].contiguous()


def summed_own_part(x: Tensor, group: World, dim: int) -> Tensor:
    """Return this rank's part of the sum of all ranks' `x`."""
    parts = torch.stack(x.chunk(group.size, dim))
    return group.reduce_scatter(parts).view(parts.shape[1:])


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: World, dim: int, forward: Change, backward: Change) -> Tensor:
        ctx.group, ctx.dim, ctx.change = group, dim, backward
        with group.resource(ExchangeTimes).count():
            return forward(x, group, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ctx.group.resource(ExchangeTimes).count():
            return ctx.change(gradient, ctx.group, ctx.dim), None, None, None, None


def _apply(x: Tensor, group: World, dim: int, forward: Change, backward: Change) -> Tensor:
    found: Tensor = _Activation.apply(x, group, dim, forward, backward)
    return found


def copy_to_group(x: Tensor, group: World) -> Tensor:
    """Return `x`, whole on all ranks, for layers of which each rank has a part."""
    return _apply(x, group, -1, same, summed)


def sum_over_group(x: Tensor, group: World) -> Tensor:
    """Return the sum of all ranks' `x`, whole on all ranks."""
    return _apply(x, group, -1, summed, same)


def gather_parts(x: Tensor, group: World, dim: int = -1) -> Tensor:
    """Return the whole activation from each rank's part along `dim`; what follows is the same on all ranks."""
    return _apply(x, group, dim, gathered, own_part)


def cut_own_part(x: Tensor, group: World, dim: int = -1) -> Tensor:
    """Return this rank's part along `dim` of an activation that is whole on all ranks."""
    return _apply(x, group, dim, own_part, gathered)


def gather_to_group(x: Tensor, group: World, dim: int = -1) -> Tensor:
    """Return the whole activation from each rank's part, for layers of which each rank has a part."""
    return _apply(x, group, dim, gathered, summed_own_part)


def scatter_sum(x: Tensor, group: World, dim: int = -1) -> Tensor:
    """Return this rank's part along `dim` of the sum of all ranks' `x`."""
    return _apply(x, group, dim, summed_own_part, gathered)
