"""Convolution with fewer multiplications (Winograd 1980; Lavin and Gray 2016): tiles as products of polynomials.

    F(m, r)   m x m outputs of a kernel r x r from a tile of t x t inputs, t = m + r - 1, with t t multiplications for
              each channel in and out instead of m m r r:  F(4, 3): 36 for 144, F(2, 3): 16 for 36, F(2, 5): 36 for 100

    c, d: in_channels, out_channels

    inputs   (pixels, c) ─ tiles ─ B ─▶ t t matrices (tiles, c) ┐
    weight   (r r, c x d)        ─ G ─▶ t t matrices (c, d)     ┴ t t products ─ A ─▶ tiles of m x m outputs

    4 tiles of F(2, 3) cover 4 x 4 outputs:  16 products (4, c) (c, d) instead of 16 x 9

A polynomial of degree t - 1 is given by its values at t points: B evaluates the inputs, G the kernel; A interpolates.
The points are 0, 1, -1 and infinity, or 0, 3/4, -3/4, 3/2, -3/2 and infinity: near to each other and to 1, they cost
half the digits that 0, 1, -1, 2, -2 do (after Barabasz, Anderson, Soodhalter and Gregg 2020). More points cost more, so
t is at most 6. The gradient of the inputs is a convolution with the flipped kernel. The gradient of the weight sums,
over tiles, the products of the evaluated inputs and output gradients.

Errors relative to a plain sum in the same format: 3 times for F(2, 3), 10 times for F(4, 3) and F(2, 5) in bfloat16,
where the evaluated numbers are rounded too (0.5% and 1.7% of the result), 2 to 3 times in float32 (1e-6). float16, with
its small range, is left to other algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial import polynomial
from numpy.typing import NDArray
from torch import Tensor

from unisono.compute.geometry import ConvolutionAlgorithm, Geometry, Pair, padded, to_nchw, to_nhwc

POINTS = {2: (0.0, 1.0), 3: (0.0, 1.0, -1.0), 5: (0.0, 0.75, -0.75, 1.5, -1.5)}
"""Points where polynomials are evaluated, in addition to infinity, by their number."""

FORMATS = (torch.bfloat16, torch.float32, torch.float64)

TILES_PER_BLOCK = 512
"""Approximate number of tiles at a time: enough rows for a product, few enough for the cache."""

Matrix = NDArray[np.float64]


class Transforms:
    """The three matrices of F(`outputs`, `kernel`), as in  y = A ((G g) * (B x)),  for one dimension."""

    def __init__(self, outputs: int, kernel: int) -> None:
        self.outputs, self.kernel, self.tile = outputs, kernel, outputs + kernel - 1
        points = np.array(POINTS[self.tile - 1])
        others = [np.delete(points, index) for index in range(len(points))]
        self.output_transform: Matrix = np.column_stack(
            [np.vander(points, outputs, increasing=True).T, np.eye(outputs)[-1]]
        )
        """A, (outputs, tile): from values at the points, and at infinity, to coefficients."""
        scales = np.array([np.prod(point - rest) for point, rest in zip(points, others, strict=True)])
        self.filter_transform: Matrix = np.vstack(
            [np.vander(points, kernel, increasing=True) / scales[:, None], np.eye(kernel)[-1]]
        )
        """G, (tile, kernel)."""
        self.input_transform: Matrix = np.vstack(
            [*(np.append(polynomial.polyfromroots(rest), 0) for rest in others), polynomial.polyfromroots(points)]
        )
        """B, (tile, tile)."""


def two_dimensional(matrix: Matrix, like: Tensor) -> Tensor:
    """Return the transform of both dimensions of an image: (rows x rows, columns x columns) for (rows, columns)."""
    return torch.from_numpy(np.kron(matrix, matrix)).to(like)


def winograd(outputs: int, kernel: int) -> ConvolutionAlgorithm:
    """Return the algorithm F(`outputs`, `kernel`)."""
    transforms = Transforms(outputs, kernel)

    def fits(geometry: Geometry) -> bool:
        return (
            geometry.kernel == (kernel, kernel)
            and geometry.stride == geometry.dilation == (1, 1)
            and max(geometry.padding) < kernel
            and geometry.dtype in FORMATS
        )

    def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
        return to_nchw(convolve(transforms, to_nhwc(inputs), weight, geometry.padding, geometry.groups))

    def grad_input(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
        out_channels, in_channels = geometry.out_channels // geometry.groups, geometry.in_channels // geometry.groups
        turned = weight.reshape(geometry.groups, out_channels, in_channels, kernel, kernel).transpose(1, 2).flip(3, 4)
        turned = turned.reshape(geometry.in_channels, out_channels, kernel, kernel)
        padding = kernel - 1 - geometry.padding[0], kernel - 1 - geometry.padding[1]
        return to_nchw(convolve(transforms, to_nhwc(gradient), turned, padding, geometry.groups))

    def grad_weight(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
        return correlate(transforms, to_nhwc(inputs), to_nhwc(gradient), geometry.padding, geometry.groups)

    return ConvolutionAlgorithm(fits, forward, grad_input, grad_weight)


def convolve(transforms: Transforms, inputs: Tensor, weight: Tensor, padding: Pair, groups: int) -> Tensor:
    """Return the convolution of (samples, height, width, in_channels) with a weight.

    The weight is (out_channels, in_channels / groups, r, r), the result (samples, height, width, out_channels).
    """
    m, r, t = transforms.outputs, transforms.kernel, transforms.tile
    samples, out_channels = len(inputs), len(weight)
    down, right = (size + 2 * edge - r + 1 for size, edge in zip(inputs.shape[1:3], padding, strict=True))
    tiles = -(-down // m), -(-right // m)
    tiled = tiles[0] * m, tiles[1] * m
    kernels = _kernels(transforms, weight, groups)
    input_transform = two_dimensional(transforms.input_transform, inputs)
    output_transform = two_dimensional(transforms.output_transform, inputs)
    outputs = inputs.new_empty(samples, down, right, out_channels)
    for some, blocks in _blocks(samples, tiles):
        source = padded(inputs[some], padding, (tiled[0] + r - 1, tiled[1] + r - 1))
        out = outputs[some] if tiled == (down, right) else outputs.new_empty(len(source), *tiled, out_channels)
        for block in blocks:
            values = _evaluate(input_transform, block.of(source, m, t), m, t, block.tiles)
            parts = [torch.bmm(part, kernel) for part, kernel in zip(values.chunk(groups, 2), kernels, strict=True)]
            products = parts[0] if groups == 1 else torch.cat(parts, 2)
            pixels = (output_transform @ products.view(t * t, -1)).view(m, m, len(source), *block.tiles, out_channels)
            block.of(out, m, m).view(len(source), block.tiles[0], m, block.tiles[1], m, out_channels).copy_(
                pixels.permute(2, 3, 0, 4, 1, 5)
            )
        if tiled != (down, right):
            outputs[some] = out[:, :down, :right]
    return outputs


def correlate(transforms: Transforms, inputs: Tensor, gradient: Tensor, padding: Pair, groups: int) -> Tensor:
    """Return the gradient of the weight, (out_channels, in_channels / groups, r, r), from tensors in NHWC order."""
    m, r, t = transforms.outputs, transforms.kernel, transforms.tile
    samples, down, right, out_channels = gradient.shape
    tiles = -(-down // m), -(-right // m)
    tiled = tiles[0] * m, tiles[1] * m
    input_transform = two_dimensional(transforms.input_transform, inputs)
    gradient_transform = two_dimensional(transforms.output_transform.T, inputs)
    in_channels = inputs.shape[3] // groups
    wide = torch.promote_types(inputs.dtype, torch.float32)
    sums = [inputs.new_zeros(t * t, in_channels, out_channels // groups, dtype=wide) for _ in range(groups)]
    for some, blocks in _blocks(samples, tiles):
        source = padded(inputs[some], padding, (tiled[0] + r - 1, tiled[1] + r - 1))
        slopes = padded(gradient[some], (0, 0), tiled)
        for block in blocks:
            values = _evaluate(input_transform, block.of(source, m, t), m, t, block.tiles)
            deltas = _evaluate(gradient_transform, block.of(slopes, m, m), m, m, block.tiles)
            for total, part, delta in zip(sums, values.chunk(groups, 2), deltas.chunk(groups, 2), strict=True):
                if total.dtype == part.dtype:
                    total.baddbmm_(part.transpose(1, 2), delta)
                else:  # a sum of 16 bits would lose digits with each block
                    total.add_(torch.bmm(part.transpose(1, 2), delta))
    total = torch.cat(sums, 2).view(t * t, -1)
    kernels = two_dimensional(transforms.filter_transform.T, total) @ total
    return kernels.view(r, r, in_channels, out_channels).permute(3, 2, 0, 1).to(inputs.dtype)


def _kernels(transforms: Transforms, weight: Tensor, groups: int) -> Sequence[Tensor]:
    """Return, for each group, the evaluated weight, (tile x tile, in_channels, out_channels)."""
    out_channels, in_channels, r, _ = weight.shape
    flat = weight.permute(2, 3, 1, 0).reshape(r * r, in_channels * out_channels)
    values = two_dimensional(transforms.filter_transform, weight) @ flat
    return values.view(-1, in_channels, out_channels).chunk(groups, 2)


def _evaluate(matrix: Tensor, source: Tensor, step: int, size: int, tiles: Pair) -> Tensor:
    """Return the values of tiles of `size` x `size`, `step` apart: (points, tiles of all samples, channels)."""
    sample, row, column, channel = source.stride()
    samples, channels = len(source), source.shape[3]
    view = source.as_strided(
        (size, size, samples, *tiles, channels),
        (row, column, sample, step * row, step * column, channel),
        source.storage_offset(),
    )
    return (matrix @ view.reshape(size * size, -1)).view(len(matrix), -1, channels)


class TileBlock(NamedTuple):
    """Some rows of tiles, in all samples that are processed together."""

    top: int
    bottom: int
    columns: int

    @property
    def tiles(self) -> Pair:
        """Number of tiles of a sample, down and right."""
        return self.bottom - self.top, self.columns

    def of(self, source: Tensor, step: int, size: int) -> Tensor:
        """Return the block of (samples, height, width, channels) whose tiles of `size` are `step` apart."""
        return source[:, self.top * step : (self.bottom - 1) * step + size]


def _blocks(samples: int, tiles: Pair) -> Iterator[tuple[slice, list[TileBlock]]]:
    """Yield samples with their blocks of rows of tiles: several samples with all rows, or one with some rows a block.

    A block has about TILES_PER_BLOCK tiles. Little is copied for it: a few samples, never all.
    """
    down, right = tiles
    each, rows_of = max(1, TILES_PER_BLOCK // (down * right)), min(down, max(1, TILES_PER_BLOCK // right))
    blocks = [TileBlock(top, min(down, top + rows_of), right) for top in range(0, down, rows_of)]
    for first in range(0, samples, each):
        yield slice(first, min(samples, first + each)), blocks


WINOGRAD = {
    "winograd 4x4, 3x3": winograd(4, 3),
    "winograd 2x2, 3x3": winograd(2, 3),
    "winograd 2x2, 5x5": winograd(2, 5),
}
