"""PyTorch's own convolution (on a CPU oneDNN's), with channels last or channels first in memory.

channels last    sample, height, width, channel      the memory format of the other layers
channels first   sample, channel, height, width      transposed before and after
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, Pass

CONVOLUTION = torch.ops.aten.convolution
BACKWARD = torch.ops.aten.convolution_backward


MIN_STRIDED_CHANNELS = 16
"""Input channels below which oneDNN writes beyond its workspace: see `_without_stride`."""


def _algorithm(memory: torch.memory_format) -> ConvolutionAlgorithm:
    def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
        inputs, weight = inputs.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
        outputs: Tensor = CONVOLUTION(inputs, weight, None, *_sizes(geometry))
        return outputs.contiguous(memory_format=torch.channels_last)

    def backward(geometry: Geometry, gradient: Tensor, inputs: Tensor, weight: Tensor, which: Pass) -> Tensor:
        wanted = (which is Pass.GRAD_INPUT, which is Pass.GRAD_WEIGHT, False)
        slopes = gradient.contiguous(memory_format=memory)
        gradients: tuple[Tensor, ...] = BACKWARD(slopes, inputs, weight, None, *_sizes(geometry), wanted)
        return gradients[wanted.index(True)]

    def grad_input(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
        weight = weight.contiguous(memory_format=memory)
        shape = (geometry.samples, geometry.in_channels, *geometry.size)
        inputs = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=memory)
        return backward(geometry, gradient, inputs, weight, Pass.GRAD_INPUT).contiguous(
            memory_format=torch.channels_last
        )

    def grad_weight(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
        geometry, inputs = _without_stride(geometry, inputs)
        shape = (geometry.out_channels, geometry.in_channels // geometry.groups, *geometry.kernel)
        weight = torch.empty(shape, dtype=inputs.dtype, device=inputs.device).contiguous(memory_format=memory)
        return backward(geometry, gradient, inputs.contiguous(memory_format=memory), weight, Pass.GRAD_WEIGHT)

    return ConvolutionAlgorithm(lambda _: True, forward, grad_input, grad_weight)


def _sizes(geometry: Geometry) -> tuple[Any, ...]:
    """Return the arguments of both functions after the bias."""
    return geometry.stride, geometry.padding, geometry.dilation, False, (0, 0), geometry.groups


def _without_stride(geometry: Geometry, inputs: Tensor) -> tuple[Geometry, Tensor]:
    """Return the geometry and inputs of the same weight gradient without a stride: the pixels that the kernel reads.

    oneDNN 3.x selects them itself. With channels last and fewer channels than a vector holds, it writes past its buffer
    (uxlfoundation/oneDNN#6035): gradients are wrong, and the process may abort much later.
    """
    if (
        geometry.kernel != (1, 1)
        or geometry.stride == (1, 1)
        or geometry.in_channels >= MIN_STRIDED_CHANNELS
        or any(geometry.padding)
    ):
        return geometry, inputs
    (down, right), (height, width) = geometry.stride, geometry.output_size
    return replace(geometry, size=(height, width), stride=(1, 1)), inputs[:, :, ::down, ::right]


CHANNELS_LAST = _algorithm(torch.channels_last)
CHANNELS_FIRST = _algorithm(torch.contiguous_format)
