"""An explicit matrix product over unfolded inputs (swCaffe 4.2): the inputs of each output, side by side in a row.

    row of an output   kernel x kernel x in_channels numbers, copied from the inputs

    outputs (pixels, out_channels)  =  rows (pixels, kernel x kernel x in_channels)
                                       x weight (kernel x kernel x in_channels, out_channels)

    1 sample, 3 channels of 224 x 224, 7x7, stride 2: 12,544 rows of 147

Only as many samples are unfolded at a time as fit into UNFOLDED_BYTES, so that rows are still in the cache when they
are multiplied. The gradient of the inputs is the transposed product, with its rows added to where they came from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, padded, to_nchw, to_nhwc

UNFOLDED_BYTES = 8 << 20
"""Bytes of rows at a time."""


def fits(geometry: Geometry) -> bool:
    """Return True for all channels, no dilation, and a kernel larger than 1 x 1."""
    return geometry.plain and geometry.kernel != (1, 1)


def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
    source, flat = padded(to_nhwc(inputs), geometry.padding), _flat(weight)
    outputs = source.new_empty(geometry.samples, *geometry.output_size, geometry.out_channels)
    for first, last in _blocks(geometry):
        out = outputs[first:last].view(-1, geometry.out_channels)
        torch.mm(_unfold(geometry, source[first:last]), flat, out=out)
    return to_nchw(outputs)


def grad_input(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
    (height, width), (above, left) = geometry.size, geometry.padding
    (down, right), (rows_of, columns) = geometry.stride, geometry.output_size
    source, flat = to_nhwc(gradient), _flat(weight).t()
    shape = geometry.samples, height + 2 * above, width + 2 * left, geometry.in_channels
    out = source.new_zeros(shape, dtype=_accumulation_dtype(geometry))
    for first, last in _blocks(geometry):
        products = source[first:last].view(-1, geometry.out_channels) @ flat
        products = products.view(last - first, rows_of, columns, *geometry.kernel, geometry.in_channels)
        for row in range(geometry.kernel[0]):
            for column in range(geometry.kernel[1]):
                to = out[first:last, row : row + down * rows_of : down, column : column + right * columns : right]
                to += products[:, :, :, row, column]
    return to_nchw(out[:, above : above + height, left : left + width].to(geometry.dtype).contiguous())


def grad_weight(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
    source, slopes = padded(to_nhwc(inputs), geometry.padding), to_nhwc(gradient)
    shape = geometry.out_channels, geometry.kernel[0] * geometry.kernel[1] * geometry.in_channels
    sums = source.new_zeros(shape, dtype=_accumulation_dtype(geometry))
    for first, last in _blocks(geometry):
        sums += slopes[first:last].view(-1, geometry.out_channels).t() @ _unfold(geometry, source[first:last])
    rounded = sums.to(geometry.dtype).view(geometry.out_channels, *geometry.kernel, geometry.in_channels)
    return rounded.permute(0, 3, 1, 2)


def _accumulation_dtype(geometry: Geometry) -> torch.dtype:
    """Return the dtype of sums: sums of several products need 32 bits at least."""
    return torch.promote_types(geometry.dtype, torch.float32)


def _flat(weight: Tensor) -> Tensor:
    """Return a weight (out_channels, in_channels, height, width) as (height x width x in_channels, out_channels)."""
    return weight.permute(2, 3, 1, 0).reshape(-1, weight.shape[0])


def _unfold(geometry: Geometry, source: Tensor) -> Tensor:
    """Return the rows of some padded samples."""
    sample, row, column, channel = source.stride()
    shape = (len(source), *geometry.output_size, *geometry.kernel, geometry.in_channels)
    strides = (sample, row * geometry.stride[0], column * geometry.stride[1], row, column, channel)
    return source.as_strided(shape, strides, source.storage_offset()).reshape(
        -1, geometry.kernel[0] * geometry.kernel[1] * geometry.in_channels
    )


def _blocks(geometry: Geometry) -> Iterator[tuple[int, int]]:
    row = geometry.kernel[0] * geometry.kernel[1] * geometry.in_channels * geometry.dtype.itemsize
    each = max(1, UNFOLDED_BYTES // (row * geometry.output_size[0] * geometry.output_size[1]))
    for first in range(0, geometry.samples, each):
        yield first, min(geometry.samples, first + each)


UNFOLDED = ConvolutionAlgorithm(fits, forward, grad_input, grad_weight)
