"""Layouts of an activation in a model group, and the collectives that change one into another (PCL-DNN 3.3, 3.4).

    own       (b, ..., f)         each rank has its own samples, all features: all of a data parallel layer
    whole     (G m, ..., f)       the group's samples on every rank
    part      (G m, ..., f / G)   the group's samples, each rank its own features
    partial   (G m, ..., f)       the group's samples; the ranks' sum is the activation

    change            forward          backward         along
    own to whole      all-gather       reduce-scatter   samples      ─▶ where a run of layers in groups begins
    partial to own    reduce-scatter   all-gather       samples      ─▶ where it ends
    own to part       all-to-all       all-to-all
    part to own       all-to-all       all-to-all
    part to whole     all-gather       reduce-scatter   features
    partial to part   reduce-scatter   all-gather       features

    2 ranks, b = 1, f = 2      own      rank 0: [a0 a1]              rank 1: [b0 b1]
                               part     rank 0: [a0] [b0]            rank 1: [a1] [b1]
                               whole    both: [a0 a1] [b0 b1]

For a group's activation of n bytes each of G ranks sends n (G - 1) / G in an all-gather or a reduce-scatter, and
n (G - 1) / G^2 in an all-to-all: with 4 ranks 3/4 and 3/16 of n, in one round each. Each change is the transpose of the
one backward. m is the largest b of the group; ranks with fewer samples repeat one, whose gradients are zeros.

The loss of a rank is a mean over its own samples, and that of a group a mean over all of its ranks'. So gradients are
multiplied by the rank's share of the group's samples where they enter the group, and divided by it where they leave.
Ranks tell each other their samples once for each average, since programs may declare them behind the forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.reducer.control import LossWeight
from unisono.world import World

Change = Callable[[Tensor, World, int], Tensor]
"""Function (activation, world of the group, dimension of the features) -> activation."""

SAMPLES = 0
"""Dimension of an activation's samples."""

ENTERS, LEAVES = "enters", "leaves"
"""Borders of a group, where gradients are divided and multiplied by the share of a rank's loss."""


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
        self._weight: Callable[[], LossWeight] = lambda: LossWeight(0, 1.0)
        self.rows: list[int] = []
        """Number of samples of each member."""
        self.firsts: list[int] = []
        """Number of each member's first sample in the batch of all ranks."""
        self._gathered: tuple[Tensor, int, Tensor] | None = None
        self._share: tuple[int, float] | None = None

    @property
    def block(self) -> int:
        """Samples of a member in the group's activation: the largest number of any."""
        return max(self.rows)

    def agree(self, rows: int) -> None:
        """Tell the other members the number of this rank's samples, and learn theirs."""
        own = torch.tensor([rows, self.numbers.first_of(rows)])
        table = self.world.all_gather(own, own.new_empty((self.world.size, 2)))
        self.rows, self.firsts = table[:, 0].tolist(), table[:, 1].tolist()

    def weigh_by(self, weight: Callable[[], LossWeight]) -> None:
        """Weigh the loss of this rank by what `weight` returns. Called by all members together."""
        self._weight, self._share = weight, None

    def has_share(self, average: int) -> bool:
        """Return True where the share of this rank's loss is settled for an average."""
        return self._share is not None and self._share[0] == average

    def share(self) -> float:
        """Return the share of this rank's loss in that of the group. Called in backward passes, by all members together
        for the first time in an average."""
        average, weight = self._weight()
        if self._share is None or not self.has_share(average):
            own = torch.tensor([weight], dtype=torch.float64)
            total = float(self.world.all_gather(own, own.new_empty(self.world.size)).sum())
            self._share = average, weight / total if total else 0.0
        return self._share[1]

    def remembered(self, x: Tensor) -> Tensor | None:
        """Return the gathered form of `x` where it was gathered last, as by query, key and value of one input."""
        if self._gathered is None or self._gathered[0] is not x or self._gathered[1] != x._version:
            return None
        found = self._gathered[2]
        return found if found.requires_grad == (x.requires_grad and torch.is_grad_enabled()) else None

    def remember(self, x: Tensor, gathered: Tensor) -> None:
        """Remember the gathered form of `x` until another is, or a layer gives own samples again. Tensors of inference
        mode have no version, by which a change would show."""
        self._gathered = None if x.is_inference() else (x, x._version, gathered)

    def forget(self) -> None:
        """Free the gathered activation."""
        self._gathered = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupLink:
        """Return the link of a copied model, whose losses are weighed by itself."""
        found = GroupLink(self.world, copy.deepcopy(self.numbers, memo))
        found.rows, found.firsts = self.rows, self.firsts
        return found

    def __reduce__(self) -> NoReturn:
        raise UsageError("a model with split layers cannot be pickled: save its whole_state_dict instead")


def gathered(x: Tensor, group: World, dim: int) -> Tensor:
    """Return all ranks' `x`, one after another along `dim`, in the order of ranks."""
    parts = group.all_gather(x.contiguous(), x.new_empty((group.size, *x.shape)))
    return parts.flatten(0, 1) if dim == SAMPLES else torch.cat(parts.unbind(), dim)


def scattered(x: Tensor, group: World, dim: int) -> Tensor:
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


class _LayoutChange(torch.autograd.Function):
    """Change of an activation's layout, and its transpose for the gradient, which is weighted at the group's border."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, link: GroupLink, dim: int, change: Change, transpose: Change, border: str
    ) -> Tensor:
        ctx.link, ctx.dim, ctx.transpose, ctx.border = link, dim, transpose, border
        return change(x, link.world, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        share = ctx.link.share() if ctx.border else 1.0
        if ctx.border == LEAVES:  # what does not count may be no number
            gradient = gradient * share if share else torch.zeros_like(gradient)
        gradient = ctx.transpose(gradient, ctx.link.world, ctx.dim)
        if ctx.border == ENTERS:
            gradient = gradient * (1 / share if share else 0.0)
        return gradient, None, None, None, None, None


def _exchange(x: Tensor, link: GroupLink, dim: int, change: Change, transpose: Change, border: str = "") -> Tensor:
    found: Tensor = _LayoutChange.apply(x, link, dim, change, transpose, border)
    return found


def _enter(x: Tensor, link: GroupLink, dim: int, change: Change, transpose: Change) -> Tensor:
    """Change own samples to the group's: each rank sends as many as the member with the most, and repeats its first."""
    link.agree(len(x))
    missing = link.block - len(x)
    if missing:
        filler = x.detach()[:1].expand(missing, *x.shape[1:]) if len(x) else x.new_zeros((missing, *x.shape[1:]))
        x = torch.cat([x, filler])
    return _exchange(x, link, dim, change, transpose, ENTERS)


def _leave(x: Tensor, link: GroupLink, dim: int, change: Change, transpose: Change) -> Tensor:
    """Change the group's samples to own ones, without repetitions."""
    link.forget()
    if len(x) != link.block * link.world.size:
        raise UsageError(
            f"a split layer gives {len(x)} samples of its group, whose ranks have {link.rows}: keep samples in the "
            "first dimension from the layer that gives a part to the one that takes it"
        )
    own, rows = _exchange(x, link, dim, change, transpose, LEAVES), link.rows[link.world.rank]
    return own if rows == link.block else own.narrow(SAMPLES, 0, rows)


def own_to_whole(x: Tensor, link: GroupLink) -> Tensor:
    """Return the group's samples from each rank's own."""
    found = link.remembered(x)
    if found is None:
        found = _enter(x, link, SAMPLES, gathered, scattered)
        link.remember(x, found)
    return found


def own_to_part(x: Tensor, link: GroupLink, dim: int = -1) -> Tensor:
    """Return this rank's features, along `dim`, of the group's samples, from all features of its own."""
    return _enter(x, link, dim, to_features, to_samples)


def part_to_own(x: Tensor, link: GroupLink, dim: int = -1) -> Tensor:
    """Return all features of this rank's samples, from a part of them, along `dim`, of the group's samples."""
    return _leave(x, link, dim, to_samples, to_features)


def partial_to_own(x: Tensor, link: GroupLink) -> Tensor:
    """Return the sum of all ranks' `x` for this rank's samples."""
    return _leave(x, link, SAMPLES, scattered, gathered)


def part_to_whole(x: Tensor, link: GroupLink, dim: int = -1) -> Tensor:
    """Return all features of the group's samples, from a part of them on each rank."""
    return _exchange(x, link, dim, gathered, scattered)


def partial_to_part(x: Tensor, link: GroupLink, dim: int = -1) -> Tensor:
    """Return this rank's features, along `dim`, of the sum of all ranks' `x`."""
    return _exchange(x, link, dim, scattered, gathered)
