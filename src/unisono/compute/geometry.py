"""Geometry of a convolution: its sizes, its three passes, and the operations and bytes they need; the algorithm of it.

    forward        outputs  =  inputs * weight
    grad_input     gradient of the inputs  =  gradient of the outputs * weight
    grad_weight    gradient of the weight  =  inputs * gradient of the outputs

Each pass makes the same number of multiplications: samples x output pixels x in_channels x out_channels x kernel.

    64 channels of 56 x 56 to 64, 3x3, one sample: 2 x 56 x 56 x 64 x 64 x 9 = 231 million operations
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

Pair = tuple[int, int]


class Pass(Enum):
    """One of the three passes of a layer in a training step, by the name of its function."""

    FORWARD = "forward"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution; pairs are (down, right)."""

    samples: int
    in_channels: int
    out_channels: int
    size: Pair
    """Height and width of the inputs."""
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    dtype: torch.dtype

    @cached_property
    def output_size(self) -> Pair:
        """Height and width of the outputs."""
        down, right = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return down, right

    @property
    def plain(self) -> bool:
        """True without dilation and groups: an output depends on adjacent pixels and all channels."""
        return self.dilation == (1, 1) and self.groups == 1

    @property
    def operations(self) -> int:
        """Number of additions and multiplications of a pass."""
        kernel = self.kernel[0] * self.kernel[1] * self.in_channels // self.groups
        return 2 * self.samples * self.output_size[0] * self.output_size[1] * self.out_channels * kernel

    @property
    def least_bytes(self) -> int:
        """Least bytes that a pass reads and writes: inputs, outputs and weight, once each."""
        inputs = self.samples * self.in_channels * self.size[0] * self.size[1]
        outputs = self.samples * self.out_channels * self.output_size[0] * self.output_size[1]
        weight = self.out_channels * self.in_channels // self.groups * self.kernel[0] * self.kernel[1]
        return (inputs + outputs + weight) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """All sizes in one word, as in the plan's file."""
        size, kernel, stride, padding, dilation = (
            f"{down}x{right}" for down, right in (self.size, self.kernel, self.stride, self.padding, self.dilation)
        )
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.samples}x{self.in_channels}x{size}-{self.out_channels}-kernel{kernel}-stride{stride}-padding{padding}"
            f"-dilation{dilation}-groups{self.groups}-{dtype}"
        )


def to_nhwc(images: torch.Tensor) -> torch.Tensor:
    """Return (samples, channels, height, width) as (samples, height, width, channels), contiguous in memory."""
    return images.permute(0, 2, 3, 1).contiguous()


def to_nchw(images: torch.Tensor) -> torch.Tensor:
    """Return (samples, height, width, channels) as (samples, channels, height, width), in channels-last memory."""
    return images.permute(0, 3, 1, 2)


def padded(inputs: torch.Tensor, padding: Pair, least: Pair = (0, 0)) -> torch.Tensor:
    """Return (samples, height, width, channels) with zeros around, at least `least` (height, width) in size."""
    down, right = padding
    samples, height, width, channels = inputs.shape
    size = max(height + 2 * down, least[0]), max(width + 2 * right, least[1])
    if size == (height, width):
        return inputs
    out = inputs.new_zeros(samples, *size, channels)
    out[:, down : down + height, right : right + width] = inputs
    return out


Compute = Callable[[Geometry, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ConvolutionAlgorithm:
    """Algorithm for the three passes of a convolution.

    Inputs and outputs are (samples, channels, height, width), the weight is (out_channels, in_channels / groups,
    height, width), each in any memory format.
    """

    fits: Callable[[Geometry], bool]
    forward: Compute
    """Returns the outputs, from the inputs and the weight."""
    grad_input: Compute
    """Returns the gradient of the inputs, from that of the outputs and the weight."""
    grad_weight: Compute
    """Returns the gradient of the weight, from the inputs and the gradient of the outputs."""

    def compute(self, which: Pass, geometry: Geometry, first: Tensor, second: Tensor) -> Tensor:
        """Return the result of one of the passes."""
        compute: Compute = getattr(self, which.value)
        return compute(geometry, first, second)
