"""Numbers that the masks of a model's dropouts follow from: seed, step, and the number of each sample in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class SampleNumbers:
    """Numbers of the present step. The dropouts of a model share one."""

    seed: int = 0
    step: int = 0
    first: int | None = None
    """Number of this rank's first sample in the batch of all ranks; None: shares of all ranks are equal."""
    rank: int = 0
    """Number of this rank's share of the batch."""
    counts: bool = True
    """True where steps are counted: each forward pass of the model in training is one."""

    def first_of(self, samples: int) -> int:
        """Return the number of the first of so many samples."""
        return self.rank * samples if self.first is None else self.first

    def __deepcopy__(self, _: dict[int, Any]) -> SampleNumbers:
        return self
