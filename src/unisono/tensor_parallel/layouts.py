"""Layouts of an activation in a model group, and the collectives that change one into another (PCL-DNN 3.3, 3.4).

    own       (b, ..., f)         each rank has its own samples, all features: all of a data parallel layer
    whole     (G m, ..., f)       the group's samples on every rank
    part      (G m, ..., f / G)   the group's samples, each rank its own features
    partial   (G m, ..., f)       the group's samples; the ranks' sum is the activation

    2 ranks, b = 1, f = 2      own      rank 0: [a0 a1]              rank 1: [b0 b1]
                               part     rank 0: [a0] [b0]            rank 1: [a1] [b1]
                               whole    both: [a0 a1] [b0 b1]

`CHANGES` has the collective of each change. For a group's activation of n bytes each of G ranks sends n (G - 1) / G in
an all-gather or a reduce-scatter, and n (G - 1) / G^2 in an all-to-all: with 4 ranks 3/4 and 3/16 of n, in one round
each. Each change is the transpose of the one backward. m is the largest b of the group; ranks with fewer samples repeat
one, whose gradients are zeros.

The loss of a rank is a mean over its own samples, and that of a group a mean over all of its ranks'. So gradients are
multiplied by the rank's share of the group's samples where they enter the group, and divided by it where they leave.
Ranks tell each other their samples once for each average, since programs may declare them behind the forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.tensor_parallel.plan import OWN, PART
from unisono.world import World

WHOLE, PARTIAL = "whole", "partial"

SAMPLES = 0
"""Dimension of an activation's samples."""


@dataclass
class SampleNumbers:
    """Numbers that the masks of dropouts follow from in the present step. The dropouts of a model share one."""

    seed: int = 0
    step: int = 0
    first: int | None = None
    """Number of this rank's first sample in the batch of all ranks; None: shares of all ranks are equal."""
    rank: int = 0
    """Number of this rank's share of the batch."""
    counts: bool = True
    """True where steps are counted: each forward pass of the model in training is one."""

    def first_of(self, samples: int) -> int:
        """Return the number of the first of so many samples."""
        return self.rank * samples if self.first is None else self.first


class GroupLink:
    """Model group of a rank, and what its members have told each other of the present batch.

    The split layers of a model share it.
    """

    def __init__(self, world: World, numbers: SampleNumbers) -> None:
        self.world, self.numbers = world, numbers
        self._weight: Callable[[], tuple[int, float]] = lambda: (0, 1.0)
        self.rows: list[int] = []
        """Number of samples of each member."""
        self.firsts: list[int] = []
        """Number of each member's first sample in the batch of all ranks."""
        self.gathered: tuple[Tensor, int, Tensor] | None = None
        """Own samples gathered last, their version, and those of the group; until own ones are given again."""
        self.shares: dict[int, float] = {}
        """Share of this rank's loss in that of the group, once it is settled; by the number of the present average."""

    @property
    def block(self) -> int:
        """Samples of a member in the group's activation: the largest number of any."""
        return max(self.rows)

    def agree(self, rows: int) -> None:
        """Tell the other members the number of this rank's samples, and learn theirs."""
        own = torch.tensor([rows, self.numbers.first_of(rows)])
        table = self.world.all_gather(own, own.new_empty((self.world.size, 2)))
        self.rows, self.firsts = table[:, 0].tolist(), table[:, 1].tolist()

    def weigh_by(self, weight: Callable[[], tuple[int, float]]) -> None:
        """Weigh the loss of this rank by what `weight` returns, with the number of the average (`Reducer.loss_weight`).
        Called by all members together."""
        self._weight, self.shares = weight, {}

    def share(self) -> float:
        """Return the share of this rank's loss in that of the group. Called in backward passes, by all members together
        for the first time in an average."""
        average, weight = self._weight()
        if average not in self.shares:
            own = torch.tensor([weight], dtype=torch.float64)
            total = float(self.world.all_gather(own, own.new_empty(self.world.size)).sum())
            self.shares = {average: weight / total if total else 0.0}
        return self.shares[average]

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupLink:
        """Return the link of a copied model, whose losses are weighed by itself."""
        return GroupLink(self.world, copy.deepcopy(self.numbers, memo))

    def __reduce__(self) -> NoReturn:
        raise UsageError("a model with split layers cannot be pickled: save its whole_state_dict instead")


def all_gather(x: Tensor, group: World, dim: int) -> Tensor:
    """Return all ranks' `x`, one after another along `dim`, in the order of ranks."""
    parts = group.all_gather(x.contiguous(), x.new_empty((group.size, *x.shape)))
    return parts.flatten(0, 1) if dim == SAMPLES else torch.cat(parts.unbind(), dim)


def reduce_scatter(x: Tensor, group: World, dim: int) -> Tensor:
    """Return this rank's block along `dim` of the sum of all ranks' `x`."""
    blocks = _blocks(x, group, dim)
    return group.reduce_scatter(blocks).view(blocks.shape[1:])


def to_features(x: Tensor, group: World, dim: int) -> Tensor:
    """Return the group's samples with this rank's part of the features, from own samples with all of them."""
    return group.all_to_all(_blocks(x, group, dim)).flatten(0, 1)


def to_samples(x: Tensor, group: World, dim: int) -> Tensor:
    """Return this rank's samples with all features, from the group's with a part of them."""
    return torch.cat(group.all_to_all(_blocks(x, group, SAMPLES)).unbind(), dim)


def _blocks(x: Tensor, group: World, dim: int) -> Tensor:
    """Return the ranks' equal blocks of `x` along `dim`, one behind another: (ranks, ...)."""
    if dim == SAMPLES:
        return x.contiguous().view(group.size, len(x) // group.size, *x.shape[1:])
    return torch.stack(x.chunk(group.size, dim))


Change = Callable[[Tensor, World, int], Tensor]
"""Function (activation, world of the group, dimension) -> activation."""

CHANGES: Mapping[tuple[str, str], tuple[Change, Change, int | None]] = {
    (OWN, WHOLE): (all_gather, reduce_scatter, SAMPLES),  # where a run of layers in groups begins
    (PARTIAL, OWN): (reduce_scatter, all_gather, SAMPLES),  # where it ends
    (OWN, PART): (to_features, to_samples, None),
    (PART, OWN): (to_samples, to_features, None),
    (PART, WHOLE): (all_gather, reduce_scatter, None),
    (PARTIAL, PART): (reduce_scatter, all_gather, None),
}
"""Forward pass, backward pass and dimension of each change; None: the dimension of the features."""


class _LayoutChange(torch.autograd.Function):
    """Change of an activation's layout, and its transpose for the gradient, which is weighted at the group's border."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: GroupLink, before: str, after: str, dim: int) -> Tensor:
        change, ctx.transpose, along = CHANGES[before, after]
        ctx.link, ctx.enters, ctx.leaves = link, before == OWN, after == OWN
        ctx.dim = dim if along is None else along
        return change(x, link.world, ctx.dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        share = ctx.link.share() if ctx.enters or ctx.leaves else 1.0
        if ctx.leaves:  # what does not count may be no number
            gradient = gradient * share if share else torch.zeros_like(gradient)
        gradient = ctx.transpose(gradient, ctx.link.world, ctx.dim)
        if ctx.enters:
            gradient = gradient * (1 / share if share else 0.0)
        return gradient, None, None, None, None


def change_layout(x: Tensor, link: GroupLink, before: str, after: str, dim: int = -1) -> Tensor:
    """Return an activation in another layout (`CHANGES`); `dim` is the dimension of its features.

    From own samples each rank sends as many as the member with the most, and repeats its first; own ones are given
    without repetitions. Own samples that several layers gather, as query, key and value do, are gathered once.
    """
    if before == after:
        return x
    own, version = x, None if x.is_inference() else x._version  # by which a change would show
    if before == OWN and after == WHOLE and link.gathered is not None:
        known, then, whole = link.gathered
        if known is x and then == version and whole.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
            return whole
    if before == OWN:
        link.agree(len(x))
        if missing := link.block - len(x):
            filler = x.detach()[:1].expand(missing, *x.shape[1:]) if len(x) else x.new_zeros((missing, *x.shape[1:]))
            x = torch.cat([x, filler])
    if after == OWN:
        link.gathered = None
        if len(x) != link.block * link.world.size:
            raise UsageError(
                f"a split layer gives {len(x)} samples of its group, whose ranks have {link.rows}: keep samples in the "
                "first dimension from the layer that gives a part to the one that takes it"
            )
    changed: Tensor = _LayoutChange.apply(x, link, before, after, dim)
    if before == OWN and after == WHOLE:
        link.gathered = None if version is None else (own, version, changed)
    rows = link.rows[link.world.rank] if after == OWN else len(changed)
    return changed if rows == len(changed) else changed[:rows]
