"""LAMB (You et al. 2020, algorithm 2): Adam's step, with a length proportional to the norm of each layer's weights.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g g
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w,    w = w - rate |w| / |u| u          in step t

Parameters of one dimension (norms, biases) take Adam's step unchanged, without decay. So do those whose weights or step
have norm 0. For w = [[3, 4]] and g = [[0, 1]] without decay: in the first step u = [[0, 1]], as Adam's is, up to eps;
at a rate of 0.01 the step is 0.01 x 5 / 1 u, and w = [[3, 3.95]].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.optimizers.layerwise import LayerwiseOptimizer


class LAMB(LayerwiseOptimizer):
    """Adam, with a step that is scaled layer by layer."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def direction(
        self, weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], layer: bool
    ) -> torch.Tensor:
        """Return Adam's step u, for a layer with its decay."""
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        first, second = group["betas"]
        state["step"] += 1
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step: torch.Tensor = (mean / (1 - first**steps)).div_((square / (1 - second**steps)).sqrt_().add_(group["eps"]))
        return step.add_(weights, alpha=group["weight_decay"]) if layer else step

    def scale(self, weights: float, direction: float, _: dict[str, Any]) -> float:
        """Return |w| / |u|."""
        return weights / direction

    def move(
        self,
        weights: torch.Tensor,
        direction: torch.Tensor,
        _: dict[str, Any],
        __: dict[str, Any],
        rate: float,
        ___: bool,
    ) -> None:
        """Subtract the step from the weights."""
        weights.sub_(direction, alpha=rate)


def make(groups: list[dict[str, Any]], rate: float, momentum: float) -> LAMB:
    """Return the optimizer of a recipe; the momentum is the first beta."""
    return LAMB(groups, rate, betas=(momentum, 0.999))
