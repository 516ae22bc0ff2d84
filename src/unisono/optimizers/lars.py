"""LARS (You, Gitman and Ginsburg 2017): each layer's rate is proportional to its weights' norm over its gradient's.

    v = momentum v + rate scale (g + decay w),    w = w - v,    scale = trust |w| / (|g| + decay |w|)

Parameters of one dimension (norms, biases) are updated by plain SGD with momentum, without decay and with a scale of 1.
The scale is also 1 where the norm of the weights or of the gradient is 0. For w = [[3, 4]] and g = [[0, 1]] without
decay: |w| = 5, |g| = 1, the scale is 0.001 x 5 / 1; at a rate of 2 the first step is 2 x 0.005 g, and w = [[3, 3.99]].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class LARS(torch.optim.Optimizer):
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

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Return the loss of `closure`, which computes them, if given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity, rate = state["momentum_buffer"].mul_(group["momentum"]), group["lr"]
        if parameter.ndim > 1:
            decay = group["weight_decay"]
            weights, slope = float(parameter.norm()), float(gradient.norm())
            if weights > 0 and slope > 0:
                rate = rate * group["trust"] * weights / (slope + decay * weights)
            velocity.add_(parameter, alpha=rate * decay)
        parameter.sub_(velocity.add_(gradient, alpha=rate))


def make(groups: list[dict[str, Any]], rate: float, momentum: float) -> LARS:
    """Return the optimizer of a recipe."""
    return LARS(groups, rate, momentum=momentum)
