"""Convolutions that are split over a model group, by output channels (PCL-DNN section 3.2: by feature maps).

    2 ranks, 3 ─▶ 8 channels           rank 0   x ─▶ channels 0-3 ┐
                                       rank 1   x ─▶ channels 4-7 ┴ all-gather along channels

4 ranks, 16 ─▶ 32 channels of 3 x 3, B images of 8 x 8: weight (8, 16, 3, 3) on each. The output, 2,048 B elements, is
gathered: 3/4 of it is sent. In the backward pass the input's gradient, 1,024 B elements, is summed: 3/2 of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unisono.tensor_parallel.activations import copy_to_group, gather_parts
from unisono.tensor_parallel.divide import uneven
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.plan import COLUMN, PART, Split


class ColumnParallelConvolution(ParallelLayer):
    """Convolution of which each rank has some output channels: weight (out / p, in, ...), bias (out / p)."""

    by = COLUMN
    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]

    @classmethod
    def dims(cls, split: Split) -> Mapping[str, int]:  # noqa: ARG003  the same for all
        """Return the dimension along which each split parameter is cut."""
        return {"weight": 0, "bias": 0}

    @classmethod
    def refusal(cls, layer: Any, split: Split) -> str | None:
        """Return why a layer cannot be split so."""
        if layer.groups != 1:
            return f"has {layer.groups} groups of channels: leave it whole"
        if split.takes == PART:
            return "takes whole inputs: leave away 'takes part'"
        return uneven(layer.out_channels, "output channels", split.ranks)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (N, out, ...) or this rank's channels of it, for (N, in, ...)."""
        y: Tensor = self._conv_forward(copy_to_group(input, self.group), self.weight, self.bias)  # type: ignore[operator]
        channels = -1 - len(self.kernel_size)
        return y if self.split.gives == PART else gather_parts(y, self.group, channels)


class ColumnParallelConv1d(ColumnParallelConvolution, nn.Conv1d):
    """Convolution over (N, channels, length)."""


class ColumnParallelConv2d(ColumnParallelConvolution, nn.Conv2d):
    """Convolution over (N, channels, height, width)."""


class ColumnParallelConv3d(ColumnParallelConvolution, nn.Conv3d):
    """Convolution over (N, channels, depth, height, width)."""
