"""Number of slices into which a pass of a layer is cut, along its samples.

    1,024 rows of 4,096 float32, 16.8 MB     by bytes 8     by rows 16     most 4     ─▶ 4 slices
      128 rows of 4,096 float32,  2.1 MB     by bytes 1     by rows  2     most 4     ─▶ 1 slice

All ranks of a group have the same rows and features, so they find the same number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SliceLimits:
    """Limits of the slices of a pass."""

    least_bytes: int = 2 * 1024 * 1024
    """Bytes of an exchanged activation below which a slice costs more latency than it hides."""
    least_rows: int = 64
    """Rows below which a product is slow, as it reads the weights once for each slice."""
    most: int = 4
    """Number of slices above which little is left to hide: the exchange of the last is 1 / most of the whole."""


def number_of_slices(rows: int, nbytes: int, limits: SliceLimits) -> int:
    """Return the number of slices of a pass of `rows` rows that exchanges an activation of `nbytes`; 1 for none.

    >>> number_of_slices(1024, 1024 * 4096 * 4, SliceLimits())
    4
    """
    return max(1, min(limits.most, rows // limits.least_rows, nbytes // limits.least_bytes))
