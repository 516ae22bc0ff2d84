"""Dropout whose random numbers follow from (seed, step, sample, layer), whatever the ranks and the split.

    sample 5 of a step, dropout layer 2, 8 features       mask 1 0 1 1 0 1 1 1
    the same, features split over 2 ranks                 rank 0: 1 0 1 1      rank 1: 0 1 1 1

A sample has its number in the batch of all ranks, so the same sample gets the same mask on any rank. Every rank draws
the numbers of whole samples and takes its part. A layer that is called twice in a step draws the same numbers again; so
does a recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.tensor_parallel.layer import GroupLink

WORD = (1 << 64) - 1


@dataclass
class DropoutSeed:
    """Numbers that the masks of the present step follow from. The dropouts of a model share one."""

    seed: int = 0
    step: int = 0
    first: int | None = None
    """Number of this rank's first sample in the batch of all ranks; None: shares of all ranks are equal."""
    share: int = 0
    """Number of this rank's share of the batch."""
    counts: bool = True
    """True where steps are counted: each forward pass of the model in training is one."""

    def first_of(self, samples: int) -> int:
        """Return the number of the first of so many samples."""
        return self.share * samples if self.first is None else self.first

    def __deepcopy__(self, _: dict[int, Any]) -> DropoutSeed:
        return self


class SampleDropout(nn.Dropout):
    """Dropout of activations (samples, ...), whole or in parts along a dimension."""

    seed: DropoutSeed
    layer: int
    """Number of the layer among the model's dropouts."""
    link: GroupLink | None = None
    """World of the model group where the input is a part; None where it is whole."""
    dim: int = -1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the activation with a share `p` of its elements set to 0, and the others divided by 1 - p."""
        if not self.training or self.p == 0 or not input.numel():
            return input
        samples, dim, shape = len(input), self.dim % input.ndim, list(input.shape)
        if self.link is not None:
            shape[dim] *= self.link.world.size
        first, generator = self.seed.first_of(samples), torch.Generator()
        mask = torch.empty(shape, dtype=torch.float32)
        for place in range(samples):
            generator.manual_seed(mixed(self.seed.seed, self.seed.step, first + place, self.layer) >> 1)
            torch.rand(shape[1:], generator=generator, out=mask[place])
        if self.link is not None:
            mask = mask.chunk(self.link.world.size, dim)[self.link.world.rank]
        scale = 1.0 / (1.0 - self.p) if self.p < 1 else 0.0
        return input * (mask >= self.p).to(input.dtype).mul_(scale)


def mixed(*numbers: int) -> int:
    """Return a 64-bit hash of numbers, by the mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
        state ^= state >> 31
    return state


def use_sample_dropout(model: nn.Module, seed: DropoutSeed) -> dict[str, SampleDropout]:
    """Make the model's dropouts draw from `seed`. Return them by name; modules and names stay."""
    found = dict[str, SampleDropout]()
    for name, module in model.named_modules():
        if type(module) is nn.Dropout:
            module.__class__ = SampleDropout
            assert isinstance(module, SampleDropout)
            module.seed, module.layer, module.inplace = seed, len(found), False
            found[name] = module
    return found
