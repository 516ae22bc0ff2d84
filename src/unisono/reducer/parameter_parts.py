"""Parameters of which each rank holds a part, as the reducer sees them: who holds the same part, and averages it.

4 ranks; layer A is split over 2 ranks, layer B over none; ranks 0 and 1 train on the same samples, so do 2 and 3

    rank        0    1    2    3          averaged over
    A           a0   a1   a0   a1         {0, 2} and {1, 3}           weight of a rank: 2 x its share of all samples
    B           b    b    b    b          all four                    weight of a rank: its share of all samples

Shares are counted over all ranks, so samples of a group of two count twice, in each share and in their sum. Half the
ranks hold a part, so the shares of its holders sum to 1/2: a factor of 2, the number of parts, makes that a mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Partition = tuple[tuple[int, ...], ...]
"""All ranks of a world, in groups."""


@dataclass(frozen=True)
class ParameterParts:
    """Number of parts of each trainable parameter, and the ranks that hold the same part."""

    counts: tuple[int, ...] = ()
    """Number of parts of each parameter, by its number; 1: every rank holds it whole. Empty: all are whole."""
    holders: Mapping[int, Partition] = field(default_factory=dict)
    """Groups of ranks that hold the same part, by the number of parts (2 or more)."""
    sharing: int = 1
    """Number of ranks that train on the same samples: a multiple of each number of parts."""

    def of(self, number: int) -> int:
        """Return the number of parts of a parameter."""
        return self.counts[number] if self.counts else 1

    def scale(self, parts: int, mean: bool) -> float:
        """Return the factor of gradients with so many parts, in a mean over samples or in a sum over ranks' means."""
        return float(parts) if mean else parts / self.sharing


UNSPLIT = ParameterParts()
"""No parameter is split."""
