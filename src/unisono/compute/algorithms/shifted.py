"""A sum of shifted products: one matrix product for each position of the kernel, without copies.

a padded image of width w as one row of pixels: the neighbour (i, j) of pixel t is pixel t + i w + j

    outputs[t]  =  sum over i, j of  inputs[t + i w + j]  weight[i, j]       3x3: 9 products of the same long matrix

Results at the right edge include pixels of the next row; they are computed and discarded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, padded, to_nchw, to_nhwc

MAX_KERNEL_POSITIONS = 16
"""Largest number of positions of a kernel: with more, the sums are read and written too often."""


def fits(geometry: Geometry) -> bool:
    """Return True for all channels, no dilation, stride 1, and a small kernel that reaches over its padding.

    Dtypes of 16 bits are refused, since the sums are kept in the inputs' dtype.
    """
    reaches = all(padding < kernel for padding, kernel in zip(geometry.padding, geometry.kernel, strict=True))
    small = 1 < geometry.kernel[0] * geometry.kernel[1] <= MAX_KERNEL_POSITIONS
    exact = geometry.dtype.itemsize >= torch.float32.itemsize
    return geometry.plain and geometry.stride == (1, 1) and small and reaches and exact


def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
    return to_nchw(_convolve(to_nhwc(inputs), geometry.padding, weight.permute(2, 3, 1, 0)))


def grad_input(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs: a convolution with the kernel flipped."""
    (down, right), (above, left) = geometry.kernel, geometry.padding
    turned = weight.permute(2, 3, 0, 1).flip(0, 1)
    return to_nchw(_convolve(to_nhwc(gradient), (down - 1 - above, right - 1 - left), turned))


def grad_weight(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
    source, slopes = padded(to_nhwc(inputs), geometry.padding), to_nhwc(gradient)
    sums = source.new_zeros(*geometry.kernel, geometry.in_channels, geometry.out_channels)
    slope = source.new_zeros(*source.shape[1:3], geometry.out_channels)
    height, width = geometry.output_size
    for sample in range(geometry.samples):
        slope[:height, :width] = slopes[sample]
        flat, many = source[sample].view(-1, geometry.in_channels), slope.view(-1, geometry.out_channels)
        for row, column, first in _shifts(geometry.kernel, source.shape[2]):
            sums[row, column].addmm_(flat[first:].t(), many[: len(flat) - first])
    return sums.permute(3, 2, 0, 1)


def _convolve(inputs: Tensor, padding: tuple[int, int], weight: Tensor) -> Tensor:
    """Return (samples, height, width, in_channels) convolved with (height, width, in_channels, out_channels)."""
    source, (down, right, in_channels, out_channels) = padded(inputs, padding), weight.shape
    samples, height, width = source.shape[:3]
    parts = weight.contiguous()
    out = source.new_empty(samples, height - down + 1, width - right + 1, out_channels)
    sums = source.new_empty(height * width, out_channels)
    for sample in range(samples):
        flat = source[sample].view(-1, in_channels)
        for row, column, first in _shifts((down, right), width):
            here = sums[: len(flat) - first]
            if first:
                here.addmm_(flat[first:], parts[row, column])
            else:
                torch.mm(flat, parts[row, column], out=here)
        out[sample] = sums.view(height, width, out_channels)[: height - down + 1, : width - right + 1]
    return out


def _shifts(kernel: tuple[int, int], width: int) -> Iterator[tuple[int, int, int]]:
    """Yield row and column of each position of a kernel, and the distance of its neighbour from the first."""
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            yield row, column, row * width + column


SHIFTED = ConvolutionAlgorithm(fits, forward, grad_input, grad_weight)
