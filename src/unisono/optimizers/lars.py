"""LARS (You, Gitman and Ginsburg 2017): each layer's rate is proportional to its weights' norm over its gradient's.

    v = momentum v + rate scale (g + decay w),    w = w - v,    scale = trust |w| / (|g| + decay |w|)

Parameters of one dimension (norms, biases) are updated by plain SGD with momentum, without decay and with a scale of 1.
The scale is also 1 where the norm of the weights or of the gradient is 0. For w = [[3, 4]] and g = [[0, 1]] without
decay: |w| = 5, |g| = 1, the scale is 0.001 x 5 / 1; at a rate of 2 the first step is 2 x 0.005 g, and w = [[3, 3.99]].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.optimizers.layerwise import LayerwiseOptimizer


class LARS(LayerwiseOptimizer):
    """SGD with momentum, with a rate that is scaled layer by layer."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    def direction(
        self, weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], _: dict[str, Any], __: bool
    ) -> torch.Tensor:
        """Return the gradient."""
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        return gradient

    def scale(self, weights: float, direction: float, group: dict[str, Any]) -> float:
        """Return trust |w| / (|g| + decay |w|)."""
        trust, decay = group["trust"], group["weight_decay"]
        factor: float = trust * weights / (direction + decay * weights)
        return factor

    def move(
        self,
        weights: torch.Tensor,
        direction: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        layer: bool,
    ) -> None:
        """Subtract the velocity from the weights, with decay for a layer."""
        velocity = state["momentum_buffer"].mul_(group["momentum"])
        if layer:
            velocity.add_(weights, alpha=rate * group["weight_decay"])
        weights.sub_(velocity.add_(direction, alpha=rate))


def make(groups: list[dict[str, Any]], rate: float, momentum: float) -> LARS:
    """Return the optimizer of a recipe."""
    return LARS(groups, rate, momentum=momentum)
