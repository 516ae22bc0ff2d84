"""Linear layers that are split over a model group, by output or by input features (Megatron-LM section 3).

    y = x W' + b,  2 ranks                        4 ranks, 8 ─▶ 12 features, batch B, n = 8 bytes a float64

    column   W (12, 8) = [W0; W1]                 weight (3, 8), bias (3) on each
             y = [x W0', x W1']                   gather y: 12 B n x 3/4;   backward: sum of x's gradient, 8 B n x 3/2

    row      W (12, 8) = [W0, W1], x = [x0, x1]   weight (12, 2) on each, bias (12) on all
             y = x0 W0' + x1 W1'                  sum of y: 12 B n x 3/2;   backward: gather x's gradient, 8 B n x 3/4

A column that gives its part and a row that takes it are a pair: one allreduce of the row's output in the forward pass,
one of the column's input gradient in the backward pass, nothing between. Across nodes, large activations are
exchanged in slices, beside the products (`overlap/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from unisono.tensor_parallel.activations import (
    copy_to_group,
    cut_own_part,
    gather_parts,
    gather_to_group,
    scatter_sum,
    sum_over_group,
)
from unisono.tensor_parallel.divide import uneven
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.overlap.flows import flows_of
from unisono.tensor_parallel.overlap.layer_passes import LayerPasses, apply_sliced, plan_passes
from unisono.tensor_parallel.overlap.linear import LinearProducts
from unisono.tensor_parallel.plan import COLUMN, PART, ROW, Split


def _passes(layer: ColumnParallelLinear | RowParallelLinear, x: Tensor) -> LayerPasses:
    """Return the passes of a layer for an input (..., in) or this rank's part of it."""
    rows = x.numel() // max(1, x.shape[-1])
    inputs, outputs = (rows * features * x.element_size() for features in (layer.in_features, layer.out_features))
    return plan_passes(flows_of(layer.split), rows, inputs, outputs, layer.group.nodes, layer.limits)


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
        """Return the output, (..., out) or this rank's part of it, for (..., in) or this rank's part."""
        if (passes := _passes(self, input)).sliced:
            return apply_sliced(LinearProducts(), input, self.weight, self.bias, passes, self.group)
        x = gather_to_group(input, self.group) if self.split.takes == PART else copy_to_group(input, self.group)
        y = functional.linear(x, self.weight, self.bias)
        return y if self.split.gives == PART else gather_parts(y, self.group)


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
        """Return the output, (..., out) or this rank's part of it, for (..., in) or this rank's part."""
        if (passes := _passes(self, input)).sliced:
            y = apply_sliced(LinearProducts(), input, self.weight, None, passes, self.group)
        else:
            x = input if self.split.takes == PART else cut_own_part(input, self.group)
            partial = functional.linear(x, self.weight)
            y = scatter_sum(partial, self.group) if self.split.gives == PART else sum_over_group(partial, self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)
