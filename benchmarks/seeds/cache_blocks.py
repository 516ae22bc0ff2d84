"""Search for the cache blocks of a convolution's loops that need the fewest bytes per FLOP: PCL-DNN section 2.2.

A block has b_n samples, b_i input and b_o output channels, b_h x b_w outputs and b_kh x b_kw of the kernel. It is read
once, and all its products are made from cache:

    memory ──── bytes ────▶ cache ──── FLOPs = 2 b_n b_i b_o b_h b_w b_kh b_kw

    outputs   b_n b_o b_h b_w
    weights   b_i b_o b_kh b_kw                                          bytes = size (outputs + weights + inputs)
    inputs    b_n b_i (b_h s + b_kh - 1) (b_w s + b_kw - 1)              at stride s

    minimize bytes / FLOPs, such that bytes < the cache; b_o is a multiple of the SIMD width

More of one loop never raises bytes / FLOPs: outputs, weights and inputs are each read for more products, or for as
many. So for given sizes of the others a loop takes the most that fits, and the longest of the loops over b_i, b_h and
b_w need not be searched. `search_all` does without this rule, and is the oracle of the test.

Worked example: C5 of OverFeat-FAST (`convolution_loops.py`), 1 sample, with 128 KB of cache a thread and vectors of 8.
The best block is 41 input and 48 output channels, 12x12 outputs and the whole kernel, 130,640 bytes: 0.026 B/F, where
the section finds at most 0.04 for most layers. With nothing in cache it takes 0.539.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from benchmarks.seeds.convolution_loops import FLOAT32_BYTES, ConvolutionLoops

from unisono.errors import UsageError


class CacheBlock(NamedTuple):
    """Sizes of a block, one for each loop."""

    samples: int
    in_channels: int
    out_channels: int
    rows: int
    columns: int
    kernel_rows: int
    kernel_columns: int

    def nbytes(self, stride: int, size: int = FLOAT32_BYTES) -> int:
        """Return the bytes of the block's outputs, weights and inputs."""
        outputs = self.samples * self.out_channels * self.rows * self.columns
        weights = self.in_channels * self.out_channels * self.kernel_rows * self.kernel_columns
        down, right = self.rows * stride + self.kernel_rows - 1, self.columns * stride + self.kernel_columns - 1
        return size * (outputs + weights + self.samples * self.in_channels * down * right)

    def bytes_per_flop(self, stride: int, size: int = FLOAT32_BYTES) -> float:
        """Return the block's bytes divided by the FLOPs of its products."""
        return self.nbytes(stride, size) / (2 * prod(self))


class CacheLimits(NamedTuple):
    """Limits of a block."""

    cache_bytes: int
    """Bytes of cache for a block, half of the cache where the next block is read meanwhile."""
    simd_width: int = 8
    """Numbers in a vector register."""
    size: int = FLOAT32_BYTES


def search(loops: ConvolutionLoops, limits: CacheLimits, samples: int = 1) -> CacheBlock:
    """Return a block with the fewest bytes per FLOP.

    Raises UsageError where the smallest block does not fit.
    """
    sizes = _sizes(loops, limits, samples)
    longest = max((1, 3, 4), key=lambda loop: len(sizes[loop]))  # of b_i, b_h and b_w
    most, sizes[longest] = len(sizes[longest]), range(1, 2)
    return _best((_filled(block, longest, most, loops.stride, limits) for block in _grids(sizes)), loops, limits)


def search_all(loops: ConvolutionLoops, limits: CacheLimits, samples: int = 1) -> CacheBlock:
    """Return a block with as few bytes per FLOP as that of `search`, by trying all sizes of all loops."""
    return _best(_grids(_sizes(loops, limits, samples)), loops, limits)


def _sizes(loops: ConvolutionLoops, limits: CacheLimits, samples: int) -> list[range]:
    """Return the sizes to try, loop by loop. Output channels come in vectors; the last one may be partly filled."""
    vectors = -(-loops.out_channels // limits.simd_width)
    out_channels = range(limits.simd_width, vectors * limits.simd_width + 1, limits.simd_width)
    rows, columns, *kernel = (range(1, most + 1) for most in (*loops.outputs, *loops.kernel))
    return [range(1, samples + 1), range(1, loops.in_channels + 1), out_channels, rows, columns, *kernel]


def _grids(sizes: list[range]) -> Iterator[CacheBlock]:
    """Yield all blocks, as blocks whose sizes are arrays: one for each number of samples and part of the kernel."""
    samples, *middle, kernel_rows, kernel_columns = sizes
    channels_and_outputs = np.meshgrid(*(np.array(choices, dtype=np.int64) for choices in middle), indexing="ij")
    flat: list[Any] = [grid.ravel() for grid in channels_and_outputs]
    for chosen, down, right in product(samples, kernel_rows, kernel_columns):
        arrays: list[Any] = [np.full(flat[0].shape, size) for size in (chosen, down, right)]
        yield CacheBlock(arrays[0], *flat, *arrays[1:])


def _filled(blocks: CacheBlock, loop: int, most: int, stride: int, limits: CacheLimits) -> CacheBlock:
    """Return the blocks with the most of one loop that fits, at least 1. Their bytes grow linearly with it."""
    name = CacheBlock._fields[loop]
    single, double = (blocks._replace(**{name: chosen}).nbytes(stride, limits.size) for chosen in (1, 2))
    fitting: Any = np.clip(1 + (limits.cache_bytes - 1 - single) // (double - single), 1, most)
    return blocks._replace(**{name: fitting})


def _best(grids: Iterator[CacheBlock], loops: ConvolutionLoops, limits: CacheLimits) -> CacheBlock:
    best: list[CacheBlock] = []
    for blocks in grids:
        fits: Any = np.asarray(blocks.nbytes(loops.stride, limits.size)) < limits.cache_bytes
        if fits.any():
            index = int(np.where(fits, blocks.bytes_per_flop(loops.stride, limits.size), np.inf).argmin())
            best.append(CacheBlock(*(int(np.asarray(sizes)[index]) for sizes in blocks)))
    if not best:
        raise UsageError(
            f"no block of {loops} is below {limits.cache_bytes} bytes with vectors of {limits.simd_width}; "
            "give more cache"
        )
    return min(best, key=lambda block: block.bytes_per_flop(loops.stride, limits.size))
