"""Part of a weight that one rank of a model group holds: equal stretches of one dimension.

    weight (10, 3) of an Embedding, by rows over 4 ranks      rows of 10 / 4, rounded up: 3

    rank 0  rows 0 1 2      rank 1  rows 3 4 5      rank 2  rows 6 7 8      rank 3  row 9 and two rows of zeros

Parts are equal, so that all ranks have the same buckets. What is missing in the last is zeros, which nothing reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class WeightPart(NamedTuple):
    """Part `member` of `ranks` equal parts of a tensor whose dimension `dim` has the length `length`."""

    ranks: int
    member: int
    dim: int
    length: int

    @property
    def size(self) -> int:
        """Length of each part in its dimension."""
        return -(-self.length // self.ranks)

    @property
    def start(self) -> int:
        """First element of this part in its dimension."""
        return self.member * self.size

    def shape(self, whole: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part of a tensor of shape `whole`."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def whole_shape(self, part: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the tensor that a tensor of shape `part` is a part of."""
        return (*part[: self.dim], self.length, *part[self.dim + 1 :])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of a tensor, filled up with zeros."""
        found = torch.zeros(self.shape(whole.shape), dtype=whole.dtype, device=whole.device)
        mine = whole.narrow(self.dim, min(self.start, self.length), max(0, min(self.size, self.length - self.start)))
        found.narrow(self.dim, 0, mine.shape[self.dim]).copy_(mine)
        return found

    def join(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from all parts, stacked in the order of ranks: (ranks, *shape of a part)."""
        return torch.cat(parts.unbind(), self.dim).narrow(self.dim, 0, self.length).contiguous()
