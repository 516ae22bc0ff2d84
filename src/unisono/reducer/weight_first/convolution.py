"""Convolutions of 1 to 3 dimensions, with the products that PyTorch computes, one call for each gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.reducer.weight_first.decision import call_of, pays
from unisono.reducer.weight_first.product import compute
from unisono.reducer.weight_first.readings import ReadingLayer, Readings

CONVOLVE: Mapping[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
"""PyTorch's convolution, by the number of spatial dimensions."""


@dataclass(frozen=True)
class ConvolutionProduct:
    """Product of a convolution: inputs (samples, in, *space), weight (out, in / groups, *kernel), bias (out)."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def outputs(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, (samples, out, *space)."""
        options = self.stride, self.padding, self.dilation, self.groups
        return CONVOLVE[len(self.stride)](inputs, weight, bias, *options)

    def grad_input(self, gradient: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs."""
        return self._gradients(gradient, inputs, weight, (True, False, False))[0]

    def grad_weight(
        self, gradient: Tensor, inputs: Tensor, weight: Tensor, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight and of the bias."""
        _, own, bias = self._gradients(gradient, inputs, weight, (False, True, biased))
        return own, bias if biased else None

    def _gradients(self, gradient: Tensor, inputs: Tensor, weight: Tensor, wanted: Sequence[bool]) -> Sequence[Tensor]:
        """Return the gradients of inputs, weight and bias, of which those `wanted` are computed."""
        options = self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups
        found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
            gradient, inputs, weight, (len(weight),), *options, wanted
        )
        return found


def padding_of(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[int, ...] | None:
    """Return the zeros that a layer adds on both sides of each dimension; None where the sides differ ("same" with an
    odd sum)."""
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return (0,) * len(layer.kernel_size)  # other padding is added before the product
    if not isinstance(layer.padding, str):
        return layer.padding
    both = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(one % 2 for one in both) else tuple(one // 2 for one in both)


def convolve(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d,
    readings: Readings,
    own: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return the outputs of a layer whose weight gradient comes first where that pays; elsewhere its `own`."""
    if torch.compiler.is_compiling() or inputs.dim() != weight.dim() or not inputs.numel():
        return own(inputs, weight, bias)
    reading, padding = readings.of(weight), padding_of(layer)
    if reading is None or padding is None or not pays(call_of(reading, inputs, weight, operations_of(layer, inputs))):
        return own(inputs, weight, bias)
    if layer.padding_mode != "zeros":
        inputs = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    product = ConvolutionProduct(layer.stride, padding, layer.dilation, layer.groups)
    return compute(product, inputs, weight, bias, reading)


def operations_of(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor) -> int:
    """Return about how many multiplications and additions the input gradient has: borders count as if padded."""
    positions = inputs.numel() // (inputs.shape[1] * prod(layer.stride))
    return 2 * positions * layer.weight.numel()


class WeightFirstConv1d(ReadingLayer, nn.Conv1d):
    """Convolution over 1 dimension whose weight gradient comes first where that pays."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002  PyTorch's
        return convolve(self, self.readings, super()._conv_forward, input, weight, bias)

    def _get_name(self) -> str:
        return nn.Conv1d.__name__


class WeightFirstConv2d(ReadingLayer, nn.Conv2d):
    """Convolution over 2 dimensions whose weight gradient comes first where that pays."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002  PyTorch's
        return convolve(self, self.readings, super()._conv_forward, input, weight, bias)

    def _get_name(self) -> str:
        return nn.Conv2d.__name__


class WeightFirstConv3d(ReadingLayer, nn.Conv3d):
    """Convolution over 3 dimensions whose weight gradient comes first where that pays."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002  PyTorch's
        return convolve(self, self.readings, super()._conv_forward, input, weight, bias)

    def _get_name(self) -> str:
        return nn.Conv3d.__name__
