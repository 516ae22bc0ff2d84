"""A sum of shifted products: one matrix product for each position of the kernel, without copies.

a padded picture of width w, its places one after the other: the neighbour (i, j) of place t is place t + i w + j

    outputs[t]  =  sum over i, j of  inputs[t + i w + j]  weight[i, j]       3x3: 9 products of the same long matrix

Results at the right edge mix in the beginning of the next row; they are computed in vain and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.compute.geometry import Geometry, image, padded, rows
from unisono.compute.ways.way import Way

MOST = 16
"""Largest number of positions of a kernel: with more, the sums are read and written too often."""


def fits(geometry: Geometry) -> bool:
    """Return True for all channels, no dilation, stride 1, and a small kernel that reaches over its padding.

    Dtypes of 16 bits are refused, since the sums are kept in the inputs' dtype.
    """
    reaches = all(padding < kernel for padding, kernel in zip(geometry.padding, geometry.kernel, strict=True))
    small = 1 < geometry.kernel[0] * geometry.kernel[1] <= MOST
    exact = geometry.dtype.itemsize >= torch.float32.itemsize
    return geometry.plain and geometry.stride == (1, 1) and small and reaches and exact


def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs."""
    return image(_convolve(rows(inputs), geometry.padding, weight.permute(2, 3, 1, 0)))


def input_gradient(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs: a convolution with the kernel flipped."""
    (down, right), (above, left) = geometry.kernel, geometry.padding
    turned = weight.permute(2, 3, 0, 1).flip(0, 1)
    return image(_convolve(rows(gradient), (down - 1 - above, right - 1 - left), turned))


def weight_gradient(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the weight."""
    source, slopes = padded(rows(inputs), geometry.padding), rows(gradient)
    found = source.new_zeros(*geometry.kernel, geometry.before, geometry.after)
    slope = source.new_zeros(*source.shape[1:3], geometry.after)
    height, width = geometry.places
    for sample in range(geometry.samples):
        slope[:height, :width] = slopes[sample]
        flat, many = source[sample].view(-1, geometry.before), slope.view(-1, geometry.after)
        for row, column, first in _shifts(geometry.kernel, source.shape[2]):
            found[row, column].addmm_(flat[first:].t(), many[: len(flat) - first])
    return found.permute(3, 2, 0, 1)


def _convolve(inputs: Tensor, padding: tuple[int, int], weight: Tensor) -> Tensor:
    """Return (samples, height, width, before) convolved with a weight (down, right, before, after)."""
    source, (down, right, before, after) = padded(inputs, padding), weight.shape
    samples, height, width = source.shape[:3]
    parts = weight.contiguous()
    out = source.new_empty(samples, height - down + 1, width - right + 1, after)
    sums = source.new_empty(height * width, after)
    for sample in range(samples):
        flat = source[sample].view(-1, before)
        for row, column, first in _shifts((down, right), width):
            here = sums[: len(flat) - first]
            if first:
                here.addmm_(flat[first:], parts[row, column])
            else:
                torch.mm(flat, parts[row, column], out=here)
        out[sample] = sums.view(height, width, after)[: height - down + 1, : width - right + 1]
    return out


def _shifts(kernel: tuple[int, int], width: int) -> Iterator[tuple[int, int, int]]:
    """Yield row and column of each position of a kernel, and the distance of its neighbour from the first."""
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            yield row, column, row * width + column


SHIFTED = Way(fits, forward, input_gradient, weight_gradient)
