"""Peak speed of the processor on large work, measured here: the bounds that layers are compared with.

products   the best of large matrix products, one square and one tall, and a       operations per second
           convolution of the library, which uses blocks that fit the caches
memory     a copy larger than the caches                                           bytes per second, read and written

A layer can exceed them a little: its numbers may lie in the cache, or the clock may be higher at that moment. Writes in
place read no line of memory first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

MATMUL_SIZES = ((2048, 2048, 2048), (16384, 512, 512))
"""Sizes of the products: rows, terms of each sum, columns."""

CONVOLUTION_SIZE = (8, 64, 56)
"""Samples, channels, height and width in pixels of the 3 x 3 convolution."""

COPY_BYTES = 256 << 20
"""Bytes of the copy."""

ATTEMPTS = 5


@dataclass(frozen=True)
class Peak:
    """Speed of a large product and of a large copy."""

    operations_per_second: float
    bytes_per_second: float

    def least_seconds(self, operations: float, least_bytes: float) -> float:
        """Return the least seconds for so many operations and bytes moved."""
        return max(operations / self.operations_per_second, least_bytes / self.bytes_per_second)

    def memory_bound(self, operations: float, least_bytes: float) -> bool:
        """Return True where memory is the bound."""
        return least_bytes / self.bytes_per_second > operations / self.operations_per_second


def measure_peak(dtype: torch.dtype) -> Peak:
    """Return the peak of products in `dtype`, and of copies."""
    products = max(*(_product(*sizes, dtype) for sizes in MATMUL_SIZES), _convolution(*CONVOLUTION_SIZE, dtype))
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return Peak(products, 2 * COPY_BYTES / fastest(lambda: target.copy_(source)))


def _product(rows: int, between: int, columns: int, dtype: torch.dtype) -> float:
    """Return operations per second of a product; the second matrix is transposed, as a layer's weight is."""
    left, right = torch.randn(rows, between).to(dtype), torch.randn(columns, between).to(dtype)
    product = torch.empty(rows, columns, dtype=dtype)
    return 2 * rows * between * columns / fastest(lambda: torch.mm(left, right.t(), out=product))


def _convolution(samples: int, channels: int, size: int, dtype: torch.dtype) -> float:
    """Return operations per second of the library's 3 x 3 convolution."""
    inputs, weight = (
        torch.randn(samples, channels, size, size).to(dtype),
        torch.randn(channels, channels, 3, 3).to(dtype),
    )
    inputs, weight = (one.contiguous(memory_format=torch.channels_last) for one in (inputs, weight))
    with torch.no_grad():
        seconds = fastest(lambda: functional.conv2d(inputs, weight, padding=1))
    return 2 * 9 * channels**2 * samples * size**2 / seconds


def fastest(work: Callable[[], object]) -> float:
    """Return the least seconds of several attempts."""
    seconds = []
    for _ in range(1 + ATTEMPTS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
