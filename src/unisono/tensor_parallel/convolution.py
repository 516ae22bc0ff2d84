"""Convolutions that are split over a model group, by output channels (PCL-DNN section 3.2: by feature maps).

    2 ranks, 3 ─▶ 8 channels           rank 0   x ─▶ channels 0-3 ┐
                                       rank 1   x ─▶ channels 4-7 ┴ all-gather along channels

4 ranks, 16 ─▶ 32 channels of 3 x 3, B images of 8 x 8: weight (8, 16, 3, 3) on each. The output, 2,048 B elements, is
gathered: 3/4 of it is sent. In the backward pass the input's gradient, 1,024 B elements, is summed: 3/2 of it. Across
nodes, large activations are exchanged in slices, beside the products (`overlap/`), unless the layer has an algorithm of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from unisono.tensor_parallel.activations import copy_to_group, gather_parts
from unisono.tensor_parallel.divide import uneven
from unisono.tensor_parallel.layer import ParallelLayer
from unisono.tensor_parallel.overlap.convolution import ConvolutionProducts
from unisono.tensor_parallel.overlap.flows import flows_of
from unisono.tensor_parallel.overlap.layer_passes import LayerPasses, apply_sliced, plan_passes
from unisono.tensor_parallel.plan import COLUMN, PART, Split


class ColumnParallelConvolution(ParallelLayer):
    """Convolution of which each rank has some output channels: weight (out / p, in, ...), bias (out / p)."""

    by = COLUMN
    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]

    @property
    def products(self) -> ConvolutionProducts | None:
        """Products of slices of samples; None where only the whole layer's own are there: other padding than zeros."""
        layer: Any = self
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            return None
        return ConvolutionProducts(layer.stride, layer.padding, layer.dilation)

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
        products, channels = self.products, -1 - len(self.kernel_size)
        if products is not None and input.ndim > len(self.kernel_size) + 1:
            passes = self._passes(products, input)
            if passes.sliced:
                return apply_sliced(products, input, self.weight, self.bias, passes, self.group)
        y: Tensor = self._conv_forward(copy_to_group(input, self.group), self.weight, self.bias)  # type: ignore[operator]
        return y if self.split.gives == PART else gather_parts(y, self.group, channels)

    def _passes(self, products: ConvolutionProducts, x: Tensor) -> LayerPasses:
        """Return the passes of the layer for an input (N, in, ...)."""
        samples, limits = len(x), replace(self.limits, least_rows=1)  # a sample has many rows of a product
        channels = self.weight.shape[0] * self.split.ranks
        outputs = samples * channels * products.positions(tuple(x.shape[2:]), self.kernel_size) * x.element_size()
        return plan_passes(flows_of(self.split), samples, x.nbytes, outputs, self.group.nodes, limits)


class ColumnParallelConv1d(ColumnParallelConvolution, nn.Conv1d):
    """Convolution over (N, channels, length)."""


class ColumnParallelConv2d(ColumnParallelConvolution, nn.Conv2d):
    """Convolution over (N, channels, height, width)."""


class ColumnParallelConv3d(ColumnParallelConvolution, nn.Conv3d):
    """Convolution over (N, channels, depth, height, width)."""
