"""Gradients in shards: a placeholder in `.grad`, as this rank has the sum of its own part alone; agreement on a step.

    backward()                       .grad is a placeholder; whatever reads it (clip_grad_norm_, ...) raises UsageError
    zero_grad()                      .grad is None; with set_to_none=False it is zeros, to which the next pass adds
    backward() without zero_grad()   the placeholder is stale: optimizer.step() refuses it

Before any shard is updated, one small sum tells what each program has done to `.grad`:

    rank 0   step(), .grad of parameter 1 is None   ─▶ [0 1 0 │ 1]  ┐
    rank 1   step(), .grad of parameter 1 is None   ─▶ [0 1 0 │ 2]  ┼ sum ─▶ [0 3 0 │ 7]: all update 0 and 2
    rank 2   step(), .grad of parameter 1 is None   ─▶ [0 1 0 │ 4]  ┘
    rank 2   no step()                              ─▶ [0 0 0 │ 0]     sum ─▶ [0 2 0 │ 3]: MismatchError, no update

A rank counts in a digit of a parameter's number: 1 for a gradient that was removed, and so on (`GradientUse`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from unisono.errors import MismatchError, UsageError
from unisono.reducer.control import names_of, rank_bit, ranks_of

_ADD, _ZERO, _ZERO_ALL = torch.ops.aten.add_.Tensor, torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default


class ScatteredGradient(torch.Tensor):
    """Tensor with a parameter's shape and dtype, without elements in memory."""

    stale: bool
    """True where a backward pass after the one that made it has found it in `.grad`."""
    _added: torch.Tensor | None
    _parameter: weakref.ref[torch.Tensor]
    _name: str

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, name: str) -> ScatteredGradient:
        """Return the placeholder for a parameter, which errors name."""
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        made.stale, made._added, made._parameter, made._name = False, None, weakref.ref(parameter), name
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScatteredGradient({tuple(self.shape)})"

    def data_ptr(self) -> int:
        """Return 0: there is no memory."""
        return 0

    def untyped_storage(self) -> Any:
        """Raise UsageError."""
        raise self._refused("untyped_storage()")

    def share_memory_(self) -> ScatteredGradient:
        """Return the placeholder: there is no memory."""
        return self

    @property
    def data(self) -> Any:
        """Placeholder itself. Raises UsageError when it is set; `Module.to` sets it to itself where nothing changes."""
        return self

    @data.setter
    def data(self, value: object) -> None:
        if value is not self:
            raise self._refused(".grad.data")

    def take_added(self) -> torch.Tensor | None:
        """Return what backward passes have added since it was made; None for nothing. The placeholder is stale."""
        self.stale, added, self._added = True, self._added, None
        return added

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, given: Any = (), named: Any = None) -> Any:
        """Take zeros, and what autograd adds. Raise UsageError for every other operation."""
        if func is _ADD and isinstance(given[0], cls) and torch._C._current_graph_task_id() != -1:
            given[0]._add(given[1])
            return given[0]
        if func in (_ZERO, _ZERO_ALL):
            for gradient in given[0] if func is _ZERO_ALL else given:
                gradient._zero() if isinstance(gradient, cls) else gradient.zero_()
            return None if func is _ZERO_ALL else given[0]
        raise next(leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, cls))._refused(func)

    def _add(self, gradient: torch.Tensor) -> None:
        self.stale = True
        self._added = gradient.clone() if self._added is None else self._added + gradient

    def _zero(self) -> None:
        if (parameter := self._parameter()) is not None and parameter.grad is self:
            parameter.grad = torch.zeros_like(parameter)
            increment_version(parameter.grad)  # as zeros that are written in place, which are no gradient

    def _refused(self, what: object) -> UsageError:
        return UsageError(
            f"{what} needs the gradient of parameter {self._name}, which Sharded has summed in shards, one on each "
            "rank: clip with unisono.Sharded(clip=...), accumulate under unisono.no_sync(model), give all parameters "
            "to one optimizer, call optimizer.zero_grad() after its step, or use unisono.BSP()"
        )


def scatter(
    parameters: Sequence[torch.Tensor], names: Sequence[str], has_gradient: Callable[[int], bool]
) -> list[torch.Tensor | None]:
    """Give each parameter a placeholder, or None where no rank has a gradient of the parameter with its index. Stale
    placeholders stay. Return what each has."""
    for index, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
        if not isinstance(parameter.grad, ScatteredGradient):
            parameter.grad = ScatteredGradient(parameter, name) if has_gradient(index) else None
    return [parameter.grad for parameter in parameters]


def clear(parameters: Sequence[torch.Tensor]) -> None:
    """Remove the placeholders. Other gradients stay."""
    for parameter in parameters:
        if isinstance(parameter.grad, ScatteredGradient):
            parameter.grad = None


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
class StepResult:
    """Steps of all ranks."""

    ranks: int
    missing: tuple[int, ...]
    """Ranks that have not made the step."""
    uses: Mapping[int, tuple[int, ...]]
    """Number of ranks for each GradientUse, by index of the parameter."""

    @property
    def removed(self) -> frozenset[int]:
        """Parameters without a gradient on any rank."""
        return frozenset(index for index, counts in self.uses.items() if counts[GradientUse.REMOVED] == self.ranks)

    def is_made(self) -> bool:
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
        for index, counts in self.uses.items():
            name = f"parameter {names[index] if names else index}"
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


def step_numbers(uses: Mapping[int, GradientUse] | None, parameters: int, rank: int, ranks: int) -> list[float]:
    """Return what a rank says of its step, to be summed over all ranks. `uses` tells how `.grad` was changed, by index
    of the parameter; it is None where the step was left out."""
    numbers = [0.0] * parameters
    for index, use in (uses or {}).items():
        numbers[index] = float(DIGIT**use)
    return [*numbers, *rank_bit(None if uses is None else rank, ranks)]


def step_result(sums: Sequence[float], parameters: int, ranks: int) -> StepResult:
    """Return what all ranks have said, from the sums of their numbers."""
    made = set(ranks_of(sums[parameters:]))
    uses = {
        index: tuple(int(total) // DIGIT**use % DIGIT for use in GradientUse)
        for index, total in enumerate(sums[:parameters])
        if total
    }
    return StepResult(ranks, tuple(rank for rank in range(ranks) if rank not in made), uses)
