"""Layouts of an activation in a model group, and the collectives that change one into another (PCL-DNN 3.3, 3.4).

    own       (b, ..., f)         each rank has its own samples, all features: all of a data parallel layer
    whole     (G m, ..., f)       the group's samples on every rank
    part      (G m, ..., f / G)   the group's samples, each rank its own features
    partial   (G m, ..., f)       the group's samples; the ranks' sum is the activation

m is the largest b of the group. A change cuts along the dimension of the layout behind it, sends each rank its block,
and joins along that of the layout before it (`exchange`). `docs/tensor_parallel.md` has all changes, the bytes that are
sent, and how gradients are weighed where ranks have fewer samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.errors import MismatchError, UsageError
from unisono.plan.layer_plan import OWN, PART
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
    ended: int = 0
    """Step of the last forward pass that did not fail."""

    def first_of(self, samples: int) -> int:
        """Return the number of the first of so many samples."""
        return self.rank * samples if self.first is None else self.first


class GroupLink:
    """Model group of a rank, which a model's split layers share, and what its members know of the present batch."""

    def __init__(self, world: World, numbers: SampleNumbers) -> None:
        self.world, self.numbers = world, numbers
        self._weight: Callable[[], tuple[int, float]] = lambda: (0, 1.0)
        self.rows: list[int] = []
        """Number of samples of each member."""
        self.firsts: list[int] = []
        """Number of each member's first sample in the batch of all ranks."""
        self.gathered: tuple[Tensor, int, Tensor] | None = None
        """Own samples gathered last, their version, and those of the group; until own ones are given again."""
        self.label = ""
        """Text about the layer that is called, which ranks compare in its exchanges, and in those of its gradients."""
        self.exchanges = 0
        """Number of exchanges of own samples in the present pass."""
        self.shares: dict[int, float] = {}
        """Share of this rank's loss in that of the group, once it is settled; by the number of the present average."""

    def agree(self, x: Tensor) -> None:
        """Tell the other members the number of this rank's samples, and learn theirs. Raises MismatchError where some
        exchange others: behind a pass that failed on some, or where some alone have a mask or give weights of keys."""
        self.exchanges += 1
        local = torch.tensor([len(x), self.numbers.first_of(len(x)), self.exchanges, x.ndim, x.shape[1:].numel()])
        table = self.world.all_gather(local, local.new_empty((self.world.size, len(local))))
        self.rows, self.firsts, at, dims, elements = table.T.tolist()
        if len({*zip(at, dims, elements, strict=True)}) > 1:
            where = f"exchanges {at}, of {elements} elements a sample, in {dims} dimensions"
            why = "a pass failed on some, or inputs, masks or need_weights differ"
            raise MismatchError(f"ranks of a group are in {where}: {why}: call the model alike on all")

    def check(self, x: Tensor) -> None:
        """Raise UsageError for an activation whose first dimension is not the samples of the group."""
        if len(x) != max(self.rows) * self.world.size:
            where = f"an activation in parts has {len(x)} samples of its group, whose ranks have {self.rows}"
            raise UsageError(f"{where}: keep samples in the first dimension up to the layer that takes the part")

    def weigh_by(self, weight: Callable[[], tuple[int, float]]) -> None:
        """Weigh the loss of this rank by what `weight` returns, with the average's number. Called by all members."""
        self._weight, self.shares = weight, {}

    def share(self) -> float:
        """Return the share of this rank's loss in that of the group; all members call it, in backward passes."""
        average, weight = self._weight()
        if average not in self.shares:
            local = torch.tensor([weight], dtype=torch.float64)
            total = float(self.world.all_gather(local, local.new_empty(self.world.size)).sum())
            self.shares = {average: weight / total if total else 0.0}
        return self.shares[average]

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupLink:
        """Return the link of a copied model, whose losses are weighed by itself."""
        return GroupLink(self.world, copy.deepcopy(self.numbers, memo))

    def __reduce__(self) -> NoReturn:
        raise UsageError("a model with split layers cannot be pickled: save its whole_state_dict instead")


def exchange(x: Tensor, group: World, cut: int | None, join: int | None) -> Tensor:
    """Send each rank its block of `x` along the dimension `cut`, or all of it; None: nothing is cut.
    Return what comes from all ranks, in their order along the dimension `join`; None: their sum."""
    if cut is None:
        blocks = group.all_gather(x.contiguous(), x.new_empty((group.size, *x.shape)))
    else:
        blocks = torch.unflatten(x, cut, (group.size, -1)).movedim(cut - (cut < 0), 0).contiguous()
    if join is None:
        return group.reduce_scatter(blocks).view(blocks.shape[1:])
    blocks = blocks if cut is None else group.all_to_all(blocks)
    return blocks.flatten(0, 1) if join == SAMPLES else torch.cat(blocks.unbind(), join)


class _LayoutChange(torch.autograd.Function):
    """Change of an activation's layout, and its transpose for the gradient, which is weighted at the group's border."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: GroupLink, cut: int | None, join: int | None) -> Tensor:
        ctx.link, ctx.cut, ctx.join, ctx.label = link, cut, join, link.label
        with link.world.labelled(link.label):
            return exchange(x, link.world, cut, join).detach()  # no view: the next layer may change it in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        enters, leaves = ctx.join == SAMPLES, ctx.cut == SAMPLES
        share = ctx.link.share() if enters or leaves else 1.0
        if leaves:  # what does not count may be no number
            gradient = gradient * share if share else torch.zeros_like(gradient)
        with ctx.link.world.labelled(ctx.label):
            gradient = exchange(gradient, ctx.link.world, ctx.join, ctx.cut)
        return gradient * (1 / share if share else 0.0) if enters else gradient, None, None, None


@torch._disable_dynamo  # type: ignore[attr-defined]
def change_layout(x: Tensor, link: GroupLink | None, before: str, after: str, dim: int = -1) -> Tensor:
    """Return an activation in another layout; `dim` is the dimension of its features. `link` None: of a whole layer.
    From own samples each rank sends as many as the member with the most, and repeats its first; own ones are given
    without repetitions. Own samples that several layers gather, as query, key and value do, are gathered once."""
    if before == after or link is None:
        return x
    own, version = x, None if x.is_inference() else x._version  # by which a change would show
    if before == OWN and after == WHOLE and link.gathered is not None:
        known, then, whole = link.gathered
        if known is x and then == version and whole.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
            return whole
    if before == OWN:
        link.agree(x)
        if missing := max(link.rows) - len(x):
            filler = x.detach()[:1].expand(missing, *x.shape[1:]) if len(x) else x.new_zeros((missing, *x.shape[1:]))
            x = torch.cat([x, filler])
    if after == OWN:
        link.gathered = None
        link.check(x)
    blocks = {OWN: SAMPLES, PART: dim}
    changed: Tensor = _LayoutChange.apply(x, link, blocks.get(after), blocks.get(before))
    if before == OWN and after == WHOLE:
        link.gathered = None if version is None else (own, version, changed)
    return changed[: link.rows[link.world.rank]] if after == OWN else changed
