"""Convolutions of 1 to 3 dimensions, with the products that PyTorch computes, one call for each gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from unisono.reducer.weight_first.decision import call_of, pays, plain
from unisono.reducer.weight_first.product import compute
from unisono.reducer.weight_first.readings import Reading
from unisono.reducer.weight_first.taken import TakenLayer

CONVOLVE: Mapping[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
"""PyTorch's convolution, by the number of spatial dimensions."""

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
"""Classes of the layers that these products are for. A subclass has its own."""


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


def padding_of(layer: Convolution) -> tuple[int, ...] | None:
    """Return the zeros that a layer adds on both sides of each dimension; None where the sides differ ("same" with an
    odd sum)."""
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return (0,) * len(layer.kernel_size)  # other padding is added before the product
    if not isinstance(layer.padding, str):
        return layer.padding
    both = [step * (size - 1) for step, size in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(one % 2 for one in both) else tuple(one // 2 for one in both)


def operations_of(layer: Convolution, inputs: Tensor) -> int:
    """Return about how many multiplications and additions the input gradient has: borders count as if padded."""
    positions = inputs.numel() // (inputs.shape[1] * prod(layer.stride))
    return 2 * positions * layer.weight.numel()


class WeightFirstConvolution(TakenLayer[Convolution]):
    """Convolution whose weight gradient comes first where that pays."""

    replaces = "_conv_forward"

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002  PyTorch's
        layer = self.layer
        if type(layer) in CONVOLUTIONS and plain(input, weight, bias) and input.dim() == weight.dim():
            reading, padding = self.readings.of(weight), padding_of(layer)
            if reading is not None and padding is not None and input.numel():
                call = call_of(reading, input, weight, operations_of(layer, input))
                if pays(call):
                    return convolve(layer, padding, reading, input, weight, bias)
        own: Callable[..., Tensor] = type(layer)._conv_forward
        return own(layer, input, weight, bias)


def convolve(
    layer: Convolution,
    padding: tuple[int, ...],
    reading: Reading,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """Return the outputs of a layer whose weight gradient comes first, with so many zeros added on both sides."""
    if layer.padding_mode != "zeros":
        inputs = functional.pad(inputs, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
    product = ConvolutionProduct(layer.stride, padding, layer.dilation, layer.groups)
    return compute(product, inputs, weight, bias, reading)
