"""Linear layers that are split over a model group, by output or by input features (Megatron-LM section 3).

    y = x W' + b,  2 ranks                   4 ranks, 8 ─▶ 12 features, b samples each, n = 8 bytes a float64

    column   W (12, 8) = [W0; W1]            weight (3, 8), bias (3) on each
             y = [x W0', x W1']              x to all: 4 b 8 n x 3/4;  y to its samples' rank: 4 b 12 n x 3/16

    row      W (12, 8) = [W0, W1]            weight (12, 2) on each, bias (12) on all
             y = x0 W0' + x1 W1'             x to its part's rank: 4 b 8 n x 3/16;  sum of y: 4 b 12 n x 3/4

A backward pass sends as much as the forward pass. A column that gives its part and a row that takes it are a pair: x to
all, then the sum of y, and nothing between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.tensor_parallel.layer import ParallelLayer, uneven
from unisono.tensor_parallel.layouts import (
    own_to_part,
    own_to_whole,
    part_to_own,
    part_to_whole,
    partial_to_own,
    partial_to_part,
)
from unisono.tensor_parallel.plan import COLUMN, PART, ROW, Split


class ColumnParallelLinear(ParallelLayer, nn.Linear):
    """Linear layer of which each rank has some output features: weight (out / p, in), bias (out / p)."""

    by = COLUMN

    @classmethod
    def dims(cls, split: Split) -> Mapping[str, int]:  # noqa: ARG003  the same for all
        """Return the dimension along which each split parameter is cut."""
        return {"weight": 0, "bias": 0}

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so."""
        inputs = uneven(layer.in_features, "input features", split.ranks) if split.takes == PART else None
        return uneven(layer.out_features, "output features", split.ranks) or inputs

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (b, ..., out) or a part of the group's, for (b, ..., in) or a part of the group's."""
        x = part_to_whole(input, self.link) if self.split.takes == PART else own_to_whole(input, self.link)
        y = functional.linear(x, self.weight, self.bias)
        return y if self.split.gives == PART else part_to_own(y, self.link)


class RowParallelLinear(ParallelLayer, nn.Linear):
    """Linear layer of which each rank has some input features: weight (out, in / p), bias (out)."""

    by = ROW

    @classmethod
    def dims(cls, split: Split) -> Mapping[str, int]:
        """Return the dimension along which each split parameter is cut. The bias of a part is a part."""
        return {"weight": 1, "bias": 0} if split.gives == PART else {"weight": 1}

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so."""
        outputs = uneven(layer.out_features, "output features", split.ranks) if split.gives == PART else None
        return uneven(layer.in_features, "input features", split.ranks) or outputs

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (b, ..., out) or a part of the group's, for (b, ..., in) or a part of the group's."""
        x = input if self.split.takes == PART else own_to_part(input, self.link)
        partial = functional.linear(x, self.weight)
        y = partial_to_part(partial, self.link) if self.split.gives == PART else partial_to_own(partial, self.link)
        return y if self.bias is None else y + self.bias.to(y.dtype)
