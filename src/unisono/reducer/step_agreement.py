"""Agreement of all ranks on a step in shards: one small sum before any shard is updated.

    rank 0   step(), .grad of parameter 1 is None   ─▶ [0 1 0 │ 1]  ┐
    rank 1   step(), .grad of parameter 1 is None   ─▶ [0 1 0 │ 2]  ┼ sum ─▶ [0 3 0 │ 7]: all update 0 and 2
    rank 2   step(), .grad of parameter 1 is None   ─▶ [0 1 0 │ 4]  ┘
    rank 2   no step()                              ─▶ [0 0 0 │ 0]     sum ─▶ [0 2 0 │ 3]: MismatchError, no update

A rank counts in a digit of a parameter's number: 1 for a gradient that was removed, and so on (`GradientUse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from unisono.errors import MismatchError, UsageError
from unisono.reducer.control import names_of, rank_bit, ranks_of
from unisono.reducer.scattered_gradient import ScatteredGradient

DIGIT = 1 << 16
"""Base of a parameter's number: three digits are exact in a float64."""


class GradientUse(IntEnum):
    """Change of a parameter's `.grad` between the backward pass and the step. The number is its digit."""

    REMOVED = 0
    """None: the parameter is not updated."""
    STALE = 1
    """Not cleared before another backward pass."""
    REPLACED = 2
    """A tensor that the rule has not summed, or the placeholder of another pass or parameter."""


@dataclass(frozen=True)
class StepMessage:
    """Step of one rank."""

    made: bool = False
    """True where the program has called `optimizer.step()`."""
    uses: Mapping[int, GradientUse] = field(default_factory=dict)
    """Changes by number of the parameter; one that is not here has the gradient that the backward pass has summed."""


@dataclass(frozen=True)
class StepResult:
    """Steps of all ranks."""

    ranks: int
    missing: tuple[int, ...]
    """Ranks that have not made the step."""
    uses: Mapping[int, tuple[int, ...]]
    """Number of ranks for each GradientUse, by number of the parameter."""

    @property
    def removed(self) -> frozenset[int]:
        """Parameters without a gradient on any rank."""
        return frozenset(number for number, counts in self.uses.items() if counts[GradientUse.REMOVED] == self.ranks)

    def is_made(self) -> bool:
        """Return True where the step is made."""
        return not self.missing and self.error(()) is None

    def error(self, names: Sequence[str]) -> UsageError | MismatchError | None:
        """Return the error of all ranks, with `names` of parameters where there are; None for a step that all ranks
        make, or none."""
        if len(self.missing) == self.ranks:
            return None
        if self.missing:
            return MismatchError(
                f"{names_of(self.missing)} of {self.ranks} {'has' if len(self.missing) == 1 else 'have'} left out the "
                "optimizer.step() after a backward pass with Sharded, which the others have made: no weight was "
                "changed. Make it on all ranks or on none, by a condition that has the same value on all ranks"
            )
        for number, counts in self.uses.items():
            name = f"parameter {names[number] if names else number}"
            if counts[GradientUse.STALE]:
                return UsageError(
                    f"{name} has a gradient of an earlier backward pass, which Sharded has not kept: call "
                    "optimizer.zero_grad() before each backward pass that sums gradients, accumulate under "
                    "unisono.no_sync(model), or use unisono.BSP()"
                )
            if counts[GradientUse.REPLACED]:
                return UsageError(
                    f"{name} has a gradient in .grad that Sharded has not summed: the program has set or zeroed it "
                    "after the backward pass, or a later pass under unisono.no_sync was not followed by another. Leave "
                    ".grad as backward() does, or None for no update, or use unisono.BSP()"
                )
            if 0 < counts[GradientUse.REMOVED] < self.ranks:
                return MismatchError(
                    f"{name} has no gradient on {counts[GradientUse.REMOVED]} of {self.ranks} ranks at "
                    "optimizer.step(), where the program has set .grad to None: set it on all ranks or on none"
                )
        return None


def use_of(gradient: torch.Tensor | None, placeholder: torch.Tensor | None) -> GradientUse | None:
    """Return the change of a parameter's `.grad`, where the backward pass has set this placeholder; None for none."""
    if isinstance(gradient, ScatteredGradient) and gradient.stale:
        return GradientUse.STALE
    if gradient is placeholder:
        return None
    return GradientUse.REMOVED if gradient is None else GradientUse.REPLACED


def encode(message: StepMessage, parameters: int, rank: int, ranks: int) -> list[float]:
    """Return a rank's message as numbers, to be summed over all ranks."""
    uses = [0.0] * parameters
    for number, use in message.uses.items():
        uses[number] = float(DIGIT**use)
    return [*uses, *rank_bit(rank if message.made else None, ranks)]


def decode(sums: Sequence[float], parameters: int, ranks: int) -> StepResult:
    """Return the messages of all ranks, decoded from the sums of their numbers."""
    made = set(ranks_of(sums[parameters:]))
    uses = {
        number: tuple(int(total) // DIGIT**use % DIGIT for use in GradientUse)
        for number, total in enumerate(sums[:parameters])
        if total
    }
    return StepResult(ranks, tuple(rank for rank in range(ranks) if rank not in made), uses)
