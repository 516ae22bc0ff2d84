"""Placeholder in `.grad` of a parameter whose gradient is in shards: this rank has the sum of its own part alone.

backward()                       .grad is a placeholder; whatever reads it (clip_grad_norm_, ...) raises UsageError
optimizer.step(), zero_grad()    .grad is None
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import UsageError


class ScatteredGradient(torch.Tensor):
    """Tensor with a parameter's shape and dtype, without elements in memory."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> ScatteredGradient:
        """Return the placeholder for a parameter."""
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScatteredGradient({tuple(self.shape)})"

    def data_ptr(self) -> int:
        """Return 0: there is no memory."""
        return 0

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Raise UsageError for every operation."""
        raise UsageError(
            f"{func} needs a gradient that Sharded has summed in shards, one on each rank: clip with "
            "unisono.Sharded(clip=...), accumulate under unisono.no_sync(model), call optimizer.step() after each "
            "backward(), or use unisono.BSP()"
        )


def scatter(parameters: Sequence[torch.Tensor], has_gradient: Callable[[int], bool]) -> None:
    """Give each parameter a placeholder, or None where no rank has a gradient of the parameter with its number."""
    for number, parameter in enumerate(parameters):
        parameter.grad = ScatteredGradient(parameter) if has_gradient(number) else None


def clear(parameters: Sequence[torch.Tensor]) -> None:
    """Remove the placeholders. Other gradients stay."""
    for parameter in parameters:
        if isinstance(parameter.grad, ScatteredGradient):
            parameter.grad = None
