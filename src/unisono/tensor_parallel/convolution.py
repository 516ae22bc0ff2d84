"""Convolutions that are split over a model group, by output channels (PCL-DNN section 3.2: by feature maps).

    2 ranks, 3 ─▶ 8 channels     x0 x1 ┬ rank 0 ─▶ channels 0-3 of both ┬─▶ rank 0: y0, all 8 channels
                                       └ rank 1 ─▶ channels 4-7 of both ┴─▶ rank 1: y1, all 8 channels

4 ranks, 16 ─▶ 32 channels of 3 x 3, images of 8 x 8, b a rank: weight (8, 16, 3, 3) on each. The group's input, 4,096 b
elements, is gathered: 3/4 of it is sent. Of its output, 8,192 b elements, 3/16 is sent to the ranks of the samples. The
backward pass sends as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unisono.tensor_parallel.layer import ParallelLayer, uneven
from unisono.tensor_parallel.layouts import own_to_whole, part_to_own
from unisono.tensor_parallel.plan import COLUMN, PART, Split


class ColumnParallelConvolution(ParallelLayer):
    """Convolution of which each rank has some output channels: weight (out / p, in, ...), bias (out / p)."""

    by = COLUMN
    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]

    @property
    def least_dimensions(self) -> int:
        """Least dimensions of its input: samples, channels, and those of the kernel."""
        return 2 + len(self.kernel_size)

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
            return "takes inputs of own samples: leave away 'takes part'"
        return uneven(layer.out_channels, "output channels", split.ranks)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  PyTorch's
        """Return the output, (b, out, ...) or this rank's channels of the group's, for (b, in, ...)."""
        x = own_to_whole(input, self.link)
        y: Tensor = self._conv_forward(x, self.weight, self.bias)  # type: ignore[operator]
        return y if self.split.gives == PART else part_to_own(y, self.link, 1)


class ColumnParallelConv1d(ColumnParallelConvolution, nn.Conv1d):
    """Convolution over (N, channels, length)."""


class ColumnParallelConv2d(ColumnParallelConvolution, nn.Conv2d):
    """Convolution over (N, channels, height, width)."""


class ColumnParallelConv3d(ColumnParallelConvolution, nn.Conv3d):
    """Convolution over (N, channels, depth, height, width)."""
