"""What the processor reaches at large, measured here and now: the bounds that layers are held beside.

products   large square matrices                  operations a second
memory     a copy of more than the caches hold    bytes a second, read and written

A layer can be above them a little: its numbers may lie in the cache, its sizes suit the processor better than the
square does, the clock be higher in that moment; and what is written in place needs no line of memory read for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

SIDE = 2048
"""Rows and columns of the matrices."""

COPIED = 256 << 20
"""Bytes that are copied."""

ATTEMPTS = 5


@dataclass(frozen=True)
class Peak:
    """What a large product and a large copy reach."""

    operations_per_second: float
    bytes_per_second: float

    def least_seconds(self, operations: float, least_bytes: float) -> float:
        """The bound of something that computes and moves so much."""
        return max(operations / self.operations_per_second, least_bytes / self.bytes_per_second)

    def by_memory(self, operations: float, least_bytes: float) -> bool:
        """Whether the memory is the bound."""
        return least_bytes / self.bytes_per_second > operations / self.operations_per_second


def measure_peak(dtype: torch.dtype) -> Peak:
    """The peak of products in `dtype`, and of copies."""
    left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(COPIED // 4)
    target = torch.empty_like(source)
    products = fastest(lambda: torch.mm(left, right, out=product))
    copies = fastest(lambda: target.copy_(source))
    return Peak(2 * SIDE**3 / products, 2 * COPIED / copies)


def fastest(work: Callable[[], object]) -> float:
    """The least seconds of several attempts."""
    seconds = []
    for _ in range(1 + ATTEMPTS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
