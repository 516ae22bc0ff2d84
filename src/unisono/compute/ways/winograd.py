"""Convolution with fewer multiplications (Winograd 1980; Lavin and Gray 2016): tiles as products of polynomials.

    F(m, r)   m x m outputs of a kernel r x r from a tile of t x t inputs, t = m + r - 1, with t t multiplications for
              each channel in and out instead of m m r r:  F(4, 3): 36 for 144, F(2, 3): 16 for 36, F(2, 5): 36 for 100

    inputs   (places, before) ─ tiles ─ B ─▶ t t matrices (tiles, before)  ┐
    weight   (r r, before x after)     ─ G ─▶ t t matrices (before, after) ┴ t t products ─ A ─▶ tiles of m x m outputs

    4 tiles of F(2, 3) cover 4 x 4 outputs:  16 products (4, before) (before, after), where 16 x 9 were to be made

A polynomial of degree t - 1 is given by its values at t points: B evaluates the inputs, G the kernel; A interpolates.
The points are 0, 1, -1 and infinity, or 0, 3/4, -3/4, 3/2, -3/2 and infinity: near to each other and to 1, they cost
half the digits that 0, 1, -1, 2, -2 do (after Barabasz, Anderson, Soodhalter and Gregg 2020). More points cost more, so
t is at most 6. The gradient of the inputs is a convolution with the flipped kernel. The gradient of the weight sums,
over tiles, the products of the evaluated inputs and output gradients.

Errors relative to a plain sum in the same format: 3 times for F(2, 3), 10 times for F(4, 3) and F(2, 5) in bfloat16,
where the evaluated numbers are rounded too (0.5% and 1.7% of the result), 2 to 3 times in float32 (1e-6). float16, with
its small range, is left to other ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.polynomial import polynomial
from numpy.typing import NDArray
from torch import Tensor

from unisono.compute.geometry import Geometry, Pair, image, padded, rows
from unisono.compute.ways.way import Way

POINTS = {2: (0.0, 1.0), 3: (0.0, 1.0, -1.0), 5: (0.0, 0.75, -0.75, 1.5, -1.5)}
"""Points where polynomials are evaluated, in addition to infinity, by their number."""

FORMATS = (torch.bfloat16, torch.float32, torch.float64)

TILES = 512
"""Approximate number of tiles at a time: enough rows for a product, few enough for the cache."""

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Transforms:
    """The three matrices of F(`outputs`, `kernel`), as in  y = A ((G g) * (B x)),  for one dimension."""

    outputs: int
    kernel: int

    @property
    def tile(self) -> int:
        """Number of inputs of a tile, in each direction."""
        return self.outputs + self.kernel - 1

    @property
    def points(self) -> Matrix:
        """Points where polynomials are evaluated, in addition to infinity."""
        return np.array(POINTS[self.tile - 1])

    @cached_property
    def back(self) -> Matrix:
        """A, (outputs, tile): from values at the points, and at infinity, to coefficients."""
        points = self.points
        found = np.zeros((self.outputs, self.tile))
        found[:, :-1] = points ** np.arange(self.outputs)[:, None]
        found[-1, -1] = 1
        return found

    @cached_property
    def of_kernel(self) -> Matrix:
        """G, (tile, kernel)."""
        points = self.points
        found = np.zeros((self.tile, self.kernel))
        for place, point in enumerate(points):
            found[place] = point ** np.arange(self.kernel) / np.prod(point - np.delete(points, place))
        found[-1, -1] = 1
        return found

    @cached_property
    def of_inputs(self) -> Matrix:
        """B, (tile, tile)."""
        points = self.points
        found = np.zeros((self.tile, self.tile))
        for place in range(len(points)):
            found[place, :-1] = polynomial.polyfromroots(np.delete(points, place))
        found[-1] = polynomial.polyfromroots(points)
        return found


def plane(matrix: Matrix, like: Tensor) -> Tensor:
    """Return the transform of both dimensions of an image: (rows x rows, columns x columns) for (rows, columns)."""
    return torch.from_numpy(np.kron(matrix, matrix)).to(like)


def way(outputs: int, kernel: int) -> Way:
    """Return F(`outputs`, `kernel`) as a way of computing a convolution."""
    transforms = Transforms(outputs, kernel)

    def fits(geometry: Geometry) -> bool:
        return (
            geometry.kernel == (kernel, kernel)
            and geometry.stride == geometry.dilation == (1, 1)
            and max(geometry.padding) < kernel
            and geometry.dtype in FORMATS
        )

    def forward(geometry: Geometry, inputs: Tensor, weight: Tensor) -> Tensor:
        found = convolve(transforms, rows(inputs), weight, geometry.padding, geometry.groups)
        return image(found)

    def input_gradient(geometry: Geometry, gradient: Tensor, weight: Tensor) -> Tensor:
        after, before = geometry.after // geometry.groups, geometry.before // geometry.groups
        turned = weight.reshape(geometry.groups, after, before, kernel, kernel).transpose(1, 2).flip(3, 4)
        turned = turned.reshape(geometry.before, after, kernel, kernel)
        padding = kernel - 1 - geometry.padding[0], kernel - 1 - geometry.padding[1]
        return image(convolve(transforms, rows(gradient), turned, padding, geometry.groups))

    def weight_gradient(geometry: Geometry, inputs: Tensor, gradient: Tensor) -> Tensor:
        return correlate(transforms, rows(inputs), rows(gradient), geometry.padding, geometry.groups)

    return Way(fits, forward, input_gradient, weight_gradient)


def convolve(transforms: Transforms, inputs: Tensor, weight: Tensor, padding: Pair, groups: int) -> Tensor:
    """Return the convolution of (samples, height, width, before) with a weight (after, before / groups, r, r).

    The result is (samples, down, right, after).
    """
    m, r, t = transforms.outputs, transforms.kernel, transforms.tile
    samples, after = len(inputs), len(weight)
    down, right = (size + 2 * edge - r + 1 for size, edge in zip(inputs.shape[1:3], padding, strict=True))
    tiles = -(-down // m), -(-right // m)
    within, whole = (tiles[0] * m + r - 1, tiles[1] * m + r - 1), (tiles[0] * m, tiles[1] * m)
    kernels = _kernels(transforms, weight, groups)
    of_inputs, back = plane(transforms.of_inputs, inputs), plane(transforms.back, inputs)
    found = inputs.new_empty(samples, down, right, after)
    for some, blocks in _blocks(samples, tiles):
        source = padded(inputs[some], padding, within)
        out = found[some] if whole == (down, right) else found.new_empty(len(source), *whole, after)
        for block in blocks:
            values = _evaluate(of_inputs, block.of(source, m, t), m, t, block.tiles)
            parts = [torch.bmm(part, own) for part, own in zip(_cut(values, groups), kernels, strict=True)]
            products = parts[0] if groups == 1 else torch.cat(parts, 2)
            pixels = (back @ products.view(t * t, -1)).view(m, m, len(source), *block.tiles, after)
            block.of(out, m, m).view(len(source), block.tiles[0], m, block.tiles[1], m, after).copy_(
                pixels.permute(2, 3, 0, 4, 1, 5)
            )
        if whole != (down, right):
            found[some] = out[:, :down, :right]
    return found


def correlate(transforms: Transforms, inputs: Tensor, gradient: Tensor, padding: Pair, groups: int) -> Tensor:
    """Return the gradient of the weight, (after, before / groups, r, r), from rows of inputs and output gradients."""
    m, r, t = transforms.outputs, transforms.kernel, transforms.tile
    samples, down, right, after = gradient.shape
    tiles = -(-down // m), -(-right // m)
    within, whole = (tiles[0] * m + r - 1, tiles[1] * m + r - 1), (tiles[0] * m, tiles[1] * m)
    of_inputs, forth = plane(transforms.of_inputs, inputs), plane(transforms.back.T, inputs)
    before = inputs.shape[3] // groups
    wide = torch.promote_types(inputs.dtype, torch.float32)
    sums = [inputs.new_zeros(t * t, before, after // groups, dtype=wide) for _ in range(groups)]
    for some, blocks in _blocks(samples, tiles):
        source, slopes = padded(inputs[some], padding, within), padded(gradient[some], (0, 0), whole)
        for block in blocks:
            values = _evaluate(of_inputs, block.of(source, m, t), m, t, block.tiles)
            others = _evaluate(forth, block.of(slopes, m, m), m, m, block.tiles)
            for total, part, other in zip(sums, _cut(values, groups), _cut(others, groups), strict=True):
                _add_product(total, part.transpose(1, 2), other)
    total = torch.cat(sums, 2).view(t * t, -1)
    found = plane(transforms.of_kernel.T, total) @ total
    return found.view(r, r, before, after).permute(3, 2, 0, 1).to(inputs.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the products to a sum of 32 bits or more: a sum of 16 bits would lose digits with each block."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right)
    else:
        total += torch.bmm(left, right)


def _kernels(transforms: Transforms, weight: Tensor, groups: int) -> Sequence[Tensor]:
    """Return, for each group, the evaluated weight, (tile x tile, before, after)."""
    after, before, r, _ = weight.shape
    flat = weight.permute(2, 3, 1, 0).reshape(r * r, before * after)
    found = (plane(transforms.of_kernel, weight) @ flat).view(-1, before, after)
    return _cut(found, groups)


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


def _cut(tensor: Tensor, groups: int) -> Sequence[Tensor]:
    """Return the channels of each group."""
    return tensor.chunk(groups, 2)


@dataclass(frozen=True)
class Block:
    """Some rows of tiles, in all samples at hand."""

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


def _blocks(samples: int, tiles: Pair) -> Iterator[tuple[slice, list[Block]]]:
    """Yield samples with their blocks of rows of tiles: several samples with all rows, or one with some rows a block.

    A block has about TILES tiles. Little is copied for it: a few samples, never all.
    """
    down, right = tiles
    each, rows_of = max(1, TILES // (down * right)), min(down, max(1, TILES // right))
    blocks = [Block(top, min(down, top + rows_of), right) for top in range(0, down, rows_of)]
    for first in range(0, samples, each):
        yield slice(first, min(samples, first + each)), blocks


WINOGRAD = {"winograd 4x4, 3x3": way(4, 3), "winograd 2x2, 3x3": way(2, 3), "winograd 2x2, 5x5": way(2, 5)}
