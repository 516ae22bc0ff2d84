"""Makes a table from timings: the fastest algorithm for each size, with adjacent sizes of the same algorithm joined.

bytes     ring          tree         library                   rows
1024      2.1 ms        0.9 ms       1.0 ms      tree          tree     up to 8192  (between 4096 and 16384)
4096      2.2 ms        1.2 ms       1.9 ms      tree
16384     2.3 ms        2.9 ms       2.8 ms      ring          ring     the rest
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Timing(NamedTuple):
    """Seconds per call: the median of several trials, and the interval with the true median at 95% confidence."""

    median: float
    low: float
    high: float


class Row(NamedTuple):
    """A row of the table: the choice for payloads of up to `up_to` bytes; None: for the rest."""

    up_to: int | None
    algorithm: str
    timing: Timing
    """Timing at the largest measured size that the row covers."""


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return the median of measurements in seconds with its interval, from the order statistics (distribution-free).

    With fewer than six the interval spans all of them: 95% need six.
    """
    ordered = sorted(seconds)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach))
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Timing(middle, ordered[low], ordered[high])


def rows(timings: Mapping[int, Mapping[str, Timing]]) -> list[Row]:
    """Return the rows for timings by size in bytes and algorithm.

    The algorithm with the least median is chosen for a size, unless the one for the size below is as fast within both
    intervals and less than 3% slower. A border lies at the geometric mean of the two sizes around it.
    """
    sizes = sorted(timings)
    chosen: list[str] = []
    for size in sizes:
        found = timings[size]
        best = min(found, key=lambda name: found[name].median)
        if chosen and chosen[-1] in found and found[chosen[-1]].median <= found[best].high:
            held = found[chosen[-1]]
            best = chosen[-1] if held.low <= found[best].median and held.median < 1.03 * found[best].median else best
        chosen.append(best)
    table: list[Row] = []
    for index, (size, name) in enumerate(zip(sizes, chosen, strict=True)):
        last = index + 1 == len(sizes)
        if last or chosen[index + 1] != name:
            up_to = None if last else math.isqrt(size * sizes[index + 1])
            table.append(Row(up_to, name, timings[size][name]))
    return table


def worth_another(found: Mapping[str, Sequence[float]], factor: float = 1.5) -> set[str]:
    """Return the candidates whose best time is within `factor` of the best median: the others need no more trials."""
    best = min(sorted(seconds)[len(seconds) // 2] for seconds in found.values())
    return {name for name, seconds in found.items() if min(seconds) <= factor * best}
