"""Number of slices into which a pass of a layer is cut, along its samples. For a group over several nodes:

    512 rows of 4,096 float32, 8.4 MB     by bytes 8     by rows 8     most 4     ─▶ 4 slices
     96 rows of 4,096 float32, 1.6 MB     by bytes 1     by rows 1     most 4     ─▶ 1 slice

Groups within one node have one slice, unless the limits say otherwise. All ranks of a group have the same rows and
features, so they find the same number.
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
    most_within_node: int = 1
    """The same for a group within one node, whose exchanges need the cores of the products and little time."""


def number_of_slices(rows: int, nbytes: int, nodes: int, limits: SliceLimits) -> int:
    """Return the number of slices of a pass of `rows` rows that exchanges an activation of `nbytes` over `nodes` nodes.

    >>> number_of_slices(512, 512 * 4096 * 4, 2, SliceLimits())
    4
    """
    most = limits.most if nodes > 1 else limits.most_within_node
    return max(1, min(most, rows // limits.least_rows, nbytes // limits.least_bytes))
