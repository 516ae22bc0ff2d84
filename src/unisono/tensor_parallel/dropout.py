"""Dropout whose random numbers follow from (seed, step, sample, layer), whatever the ranks and the split.

    sample 5 of a step, dropout layer 2, 8 features       mask 1 0 1 1 0 1 1 1
    the same, features split over 2 ranks                 rank 0: 1 0 1 1      rank 1: 0 1 1 1

A sample has its number in the batch of all ranks, so the same sample gets the same mask on any rank. Every rank draws
the numbers of whole samples and takes its part. A layer that is called twice in a step draws the same numbers again; so
does a recomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unisono.tensor_parallel.layouts import GroupLink, SampleNumbers

WORD = (1 << 64) - 1


class SampleDropout(nn.Dropout):
    """Dropout of activations (samples, ...), whole or in parts along a dimension."""

    numbers: SampleNumbers
    layer: int
    """Number of the layer among the model's dropouts."""
    link: GroupLink | None = None
    """Model group of which the input is a part; None where it is of own samples."""
    dim: int = -1

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the activation with a share `p` of its elements set to 0, and the others divided by 1 - p."""
        if not self.training or self.p == 0:
            return input
        dim, shape, numbers = self.dim % input.ndim, list(input.shape), self._numbers(len(input))
        if self.link is not None:
            shape[dim] *= self.link.world.size
        mask, generator = torch.empty(shape, dtype=torch.float32), torch.Generator()
        for place, number in enumerate(numbers):
            generator.manual_seed(mixed(self.numbers.seed, self.numbers.step, number, self.layer) >> 1)
            torch.rand(shape[1:], generator=generator, out=mask[place])
        if self.link is not None:
            mask = mask.chunk(self.link.world.size, dim)[self.link.world.rank]
        scale = 1.0 / (1.0 - self.p) if self.p < 1 else 0.0
        return input * (mask >= self.p).to(input.dtype).mul_(scale)

    def _numbers(self, rows: int) -> list[int]:
        """Return the number of each row's sample in the batch of all ranks."""
        if self.link is None:
            first = self.numbers.first_of(rows)
            return list(range(first, first + rows))
        return [first + place for first in self.link.firsts for place in range(self.link.block)]


def mixed(*numbers: int) -> int:
    """Return a 64-bit hash of numbers, by the mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
        state ^= state >> 31
    return state


def use_sample_dropout(model: nn.Module, numbers: SampleNumbers) -> dict[str, SampleDropout]:
    """Make the model's dropouts draw from `numbers`. Return them by name; modules and names stay."""
    dropouts = dict[str, SampleDropout]()
    for name, module in model.named_modules():
        if type(module) is nn.Dropout:
            module.__class__ = SampleDropout
            assert isinstance(module, SampleDropout)
            module.numbers, module.layer, module.inplace = numbers, len(dropouts), False
            dropouts[name] = module
    return dropouts
