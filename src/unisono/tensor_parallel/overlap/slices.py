"""Number of slices into which a pass of a layer is cut, along its samples.

    512 rows of 4,096 float32, 8.4 MB     by bytes 8     by rows 8     most 4     ─▶ 4 slices
     96 rows of 4,096 float32, 1.6 MB     by bytes 1     by rows 1     most 4     ─▶ 1 slice

All ranks of a group have the same rows and features, so they find the same number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SliceLimits:
    """Limits of the slices of a pass."""

    least_bytes: int = 1024 * 1024
    """Bytes of an exchanged activation below which a slice costs more latency than it hides: on links of 100 Mbit/s,
    2 slices of 1 MiB gained, 4 of 512 KiB gained less (`benchmarks/tensor_parallel`)."""
    least_rows: int = 64
    """Rows below which a product is slow, as it reads the weights once for each slice."""
    most: int = 4
    """Number of slices above which little is left to hide: the exchange of the last is 1 / most of the whole."""


def number_of_slices(rows: int, nbytes: int, limits: SliceLimits) -> int:
    """Return the number of slices of a pass of `rows` rows that exchanges an activation of `nbytes`; 1 for none.

    >>> number_of_slices(512, 512 * 4096 * 4, SliceLimits())
    4
    """
    return max(1, min(limits.most, rows // limits.least_rows, nbytes // limits.least_bytes))
