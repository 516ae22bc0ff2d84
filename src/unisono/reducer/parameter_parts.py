"""Parameters of which each rank holds a part, as the reducer sees them: who holds the same part, and averages it.

4 ranks with own samples; layer A is split over 2 ranks, layer B over none

    rank        0    1    2    3          summed over               factor
    A           a0   a1   a0   a1         {0, 2} and {1, 3}         1 / samples of all: its gradients are of the samples
                                                                    of a group, and weighed by them (`layouts.py`)
    B           b    b    b    b          all four                  samples of the rank / samples of all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def of(self, number: int) -> int:
        """Return the number of parts of a parameter."""
        return self.counts[number] if self.counts else 1

    def holders_of(self, number: int, rank: int, ranks: int) -> Sequence[int]:
        """Return the ranks, of so many, that hold the same part of a parameter as `rank`."""
        groups = self.holders.get(self.of(number), ())
        return next((group for group in groups if rank in group), range(ranks))


UNSPLIT = ParameterParts()
"""No parameter is split."""
