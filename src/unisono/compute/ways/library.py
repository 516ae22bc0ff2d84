"""PyTorch's own convolution, which is oneDNN's on a processor: with channels last in memory, or with channels first.

channels last    sample, down, right, channel      as everything around it has them
channels first   sample, channel, down, right      turned around before and after, where oneDNN likes that more
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from unisono.compute.geometry import Geometry, Pass
from unisono.compute.ways.way import Way

CONVOLUTION = torch.ops.aten.convolution
BACKWARD = torch.ops.aten.convolution_backward


FEW = 16
"""Number of input channels below which oneDNN writes beyond its workspace: see `_picked`."""


def _way(memory: torch.memory_format) -> Way:
    def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
        inputs, weight = inputs.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
        outputs: Tensor = CONVOLUTION(
            inputs,
            weight,
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            False,
            (0, 0),
            geometry.groups,
        )
        return outputs.contiguous(memory_format=torch.channels_last)

    def backward(geometry: Geometry, gradient: Tensor, inputs: Tensor, weight: Tensor, which: Pass) -> Tensor:
        wanted = (which is Pass.INPUT, which is Pass.WEIGHT, False)
        found: tuple[Tensor, ...] = BACKWARD(
            gradient.contiguous(memory_format=memory),
            inputs,
            weight,
            None,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            False,
            (0, 0),
            geometry.groups,
            wanted,
        )
        return found[wanted.index(True)]

    def input_gradient(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
        weight = weight.contiguous(memory_format=memory)
        shape = (geometry.samples, geometry.before, *geometry.size)
        inputs = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=memory)
        return backward(geometry, gradient, inputs, weight, Pass.INPUT).contiguous(memory_format=torch.channels_last)

    def weight_gradient(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
        geometry, inputs = _picked(geometry, inputs)
        shape = (geometry.after, geometry.before // geometry.groups, *geometry.kernel)
        weight = torch.empty(shape, dtype=inputs.dtype, device=inputs.device).contiguous(memory_format=memory)
        return backward(geometry, gradient, inputs.contiguous(memory_format=memory), weight, Pass.WEIGHT)

    return Way(lambda _: True, forward, input_gradient, weight_gradient)


def _picked(geometry: Geometry, inputs: Tensor) -> tuple[Geometry, Tensor]:
    """Return geometry and inputs of the same weight gradient without a stride: the pixels that a 1 x 1 kernel reads.

    oneDNN 3.x selects them itself. With channels last and fewer channels than a vector holds, it writes past the memory
    that it has for that (uxlfoundation/oneDNN#6035): gradients are wrong and the process may abort much later.
    """
    if geometry.kernel != (1, 1) or geometry.stride == (1, 1) or geometry.before >= FEW or any(geometry.padding):
        return geometry, inputs
    (down, right), (height, width) = geometry.stride, geometry.places
    return replace(geometry, size=(height, width), stride=(1, 1)), inputs[:, :, ::down, ::right]


CHANNELS_LAST = _way(torch.channels_last)
CHANNELS_FIRST = _way(torch.contiguous_format)
