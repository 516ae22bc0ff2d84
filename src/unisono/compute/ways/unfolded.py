"""An explicit matrix product over unfolded inputs (swCaffe 4.2): the inputs of each output, side by side in a row.

    row of an output   kernel x kernel x before numbers, copied out of the inputs
    outputs (places, after)  =  rows (places, kernel x kernel x before)  weight (kernel x kernel x before, after)

    1 sample, 3 channels of 224 x 224, 7x7, stride 2: 12,544 rows of 147

Only as many samples are unfolded at a time as fit into UNFOLDED bytes, so that rows are still in the cache when they
are multiplied. The gradient of the inputs is the transposed product, with its rows added to where they came from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.compute.geometry import Geometry, image, padded, rows
from unisono.compute.ways.way import Way

UNFOLDED = 8 << 20
"""Bytes of rows at a time."""


def fits(geometry: Geometry) -> bool:
    """Return True for all channels, no dilation, and a kernel larger than 1 x 1."""
    return geometry.plain and geometry.kernel != (1, 1)


def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
    """Return the outputs."""
    source, flat = padded(rows(inputs), geometry.padding), _flat(weight)
    outputs = source.new_empty(geometry.samples, *geometry.places, geometry.after)
    for first, last in _blocks(geometry):
        out = outputs[first:last].view(-1, geometry.after)
        torch.mm(_unfold(geometry, source[first:last]), flat, out=out)
    return image(outputs)


def input_gradient(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the inputs."""
    (height, width), (above, left) = geometry.size, geometry.padding
    (down, right), (rows_of, columns) = geometry.stride, geometry.places
    source, flat = rows(gradient), _flat(weight).t()
    shape = geometry.samples, height + 2 * above, width + 2 * left, geometry.before
    whole = source.new_zeros(shape, dtype=_of_sums(geometry))
    for first, last in _blocks(geometry):
        found = source[first:last].view(-1, geometry.after) @ flat
        seen = found.view(last - first, rows_of, columns, *geometry.kernel, geometry.before)
        for row in range(geometry.kernel[0]):
            for column in range(geometry.kernel[1]):
                to = whole[first:last, row : row + down * rows_of : down, column : column + right * columns : right]
                to += seen[:, :, :, row, column]
    return image(whole[:, above : above + height, left : left + width].to(geometry.dtype).contiguous())


def weight_gradient(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the weight."""
    source, slopes = padded(rows(inputs), geometry.padding), rows(gradient)
    shape = geometry.after, geometry.kernel[0] * geometry.kernel[1] * geometry.before
    found = source.new_zeros(shape, dtype=_of_sums(geometry))
    for first, last in _blocks(geometry):
        found += slopes[first:last].view(-1, geometry.after).t() @ _unfold(geometry, source[first:last])
    whole = found.to(geometry.dtype).view(geometry.after, *geometry.kernel, geometry.before)
    return whole.permute(0, 3, 1, 2)


def _of_sums(geometry: Geometry) -> torch.dtype:
    """Return the dtype of sums: sums of several products need 32 bits at least."""
    return torch.promote_types(geometry.dtype, torch.float32)


def _flat(weight: Tensor) -> Tensor:
    """Return a weight (after, before, down, right) as (down x right x before, after)."""
    return weight.permute(2, 3, 1, 0).reshape(-1, weight.shape[0])


def _unfold(geometry: Geometry, source: Tensor) -> Tensor:
    """Return the rows of some samples, which are padded with zeros."""
    sample, row, column, channel = source.stride()
    shape = (len(source), *geometry.places, *geometry.kernel, geometry.before)
    strides = (sample, row * geometry.stride[0], column * geometry.stride[1], row, column, channel)
    return source.as_strided(shape, strides, source.storage_offset()).reshape(
        -1, geometry.kernel[0] * geometry.kernel[1] * geometry.before
    )


def _blocks(geometry: Geometry) -> Iterator[tuple[int, int]]:
    row = geometry.kernel[0] * geometry.kernel[1] * geometry.before * geometry.dtype.itemsize
    each = max(1, UNFOLDED // (row * geometry.places[0] * geometry.places[1]))
    for first in range(0, geometry.samples, each):
        yield first, min(geometry.samples, first + each)


UNFOLD = Way(fits, forward, input_gradient, weight_gradient)
