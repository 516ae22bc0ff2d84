"""Parameters of which each rank holds a part, as the reducer sees them: who holds the same part, and averages it.

4 ranks with own samples; layer A is split over the groups {0, 1} and {2, 3}, layer B over none

    rank        0    1    2    3          summed over               weight of a rank
    A           a0   a1   a0   a1         {0, 2} and {1, 3}         samples of its group / samples of all
    B           b    b    b    b          all four                  samples of the rank / samples of all

The gradient of a part is a mean over the samples of the group, by which its layers weigh the losses of its ranks
(`tensor_parallel/layouts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from unisono.placement import Partition, holders_of


@dataclass(frozen=True)
class ParameterParts:
    """Number of parts of each trainable parameter, and the groups of ranks that hold all parts of one."""

    counts: tuple[int, ...] = ()
    """Number of parts of each parameter, by its number; 1: every rank holds it whole. Empty: all are whole."""
    groups: Mapping[int, Partition] = field(default_factory=dict)
    """Groups whose member k holds part k, by the number of parts (2 or more)."""

    @cached_property
    def holders(self) -> Mapping[int, Partition]:
        """Ranks that hold the same part, for each part, by the number of parts."""
        return {count: holders_of(groups) for count, groups in self.groups.items()}

    def of(self, number: int) -> int:
        """Return the number of parts of a parameter."""
        return self.counts[number] if self.counts else 1

    def group_of(self, count: int, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold all of a parameter with so many parts, `rank` among them."""
        return next((group for group in self.groups.get(count, ()) if rank in group), (rank,))

    def holders_of(self, number: int, rank: int, ranks: int) -> Sequence[int]:
        """Return the ranks, of so many, that hold the same part of a parameter as `rank`."""
        groups = self.holders.get(self.of(number), ())
        return next((group for group in groups if rank in group), range(ranks))


UNSPLIT = ParameterParts()
"""No parameter is split."""
