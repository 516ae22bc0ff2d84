"""Placeholder in `.grad` of a parameter whose gradient is in shards: this rank has the sum of its own part alone.

backward()                       .grad is a placeholder; whatever reads it (clip_grad_norm_, ...) raises UsageError
zero_grad()                      .grad is None; with set_to_none=False it is zeros, to which the next pass adds
backward() without zero_grad()   the placeholder is stale: optimizer.step() refuses it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from unisono.errors import UsageError

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
            for one in given[0] if func is _ZERO_ALL else given:
                one._zero() if isinstance(one, cls) else one.zero_()
            return None if func is _ZERO_ALL else given[0]
        raise next(one for one in tree_leaves((given, named)) if isinstance(one, cls))._refused(func)

    def _add(self, gradient: torch.Tensor) -> None:
        self.stale = True
        self._added = gradient.clone() if self._added is None else self._added + gradient

    def _zero(self) -> None:
        if (parameter := self._parameter()) is not None and parameter.grad is self:
            parameter.grad = torch.zeros_like(parameter)

    def _refused(self, what: object) -> UsageError:
        return UsageError(
            f"{what} needs the gradient of parameter {self._name}, which Sharded has summed in shards, one on each "
            "rank: clip with unisono.Sharded(clip=...), accumulate under unisono.no_sync(model), give all parameters "
            "to one optimizer, call optimizer.zero_grad() after its step, or use unisono.BSP()"
        )


def scatter(
    parameters: Sequence[torch.Tensor], names: Sequence[str], has_gradient: Callable[[int], bool]
) -> list[torch.Tensor | None]:
    """Give each parameter a placeholder, or None where no rank has a gradient of the parameter with its number. Stale
    placeholders stay. Return what each has."""
    for number, (parameter, name) in enumerate(zip(parameters, names, strict=True)):
        if not isinstance(parameter.grad, ScatteredGradient):
            parameter.grad = ScatteredGradient(parameter, name) if has_gradient(number) else None
    return [parameter.grad for parameter in parameters]


def clear(parameters: Sequence[torch.Tensor]) -> None:
    """Remove the placeholders. Other gradients stay."""
    for parameter in parameters:
        if isinstance(parameter.grad, ScatteredGradient):
            parameter.grad = None
