"""Optimizers that scale the rate of each layer by two norms (LARS, LAMB): a step in three parts.

    direction    elementwise: what the weights are moved along, before the scale
    norms        of a layer's weights and of its direction; with shards, from sums over the ranks
    move         elementwise: state and weights

Parameters of one dimension (norms, biases) are no layers: their rate is the group's. So are layers of which either norm
is 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers whose rate is scaled layer by layer. Its methods take a parameter's weights, or a part."""

    @abstractmethod
    def direction(
        self, weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], layer: bool
    ) -> torch.Tensor:
        """Return the direction of the step, and update the state that it depends on. `layer`: True for a layer."""

    @abstractmethod
    def scale(self, weights: float, direction: float, group: dict[str, Any]) -> float:
        """Return the factor of a layer's rate, from the norms of its weights and its direction, both above 0."""

    @abstractmethod
    def move(
        self,
        weights: torch.Tensor,
        direction: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        rate: float,
        layer: bool,
    ) -> None:
        """Move weights along a direction, in place, at a rate that is scaled already."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Return the loss of `closure`, which computes them, if given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def rate(self, norms: tuple[float, float] | None, group: dict[str, Any]) -> float:
        """Return the rate for a layer with these norms of weights and direction; None for what is no layer."""
        rate: float = group["lr"]
        if norms is not None and norms[0] > 0 and norms[1] > 0:
            rate = rate * self.scale(*norms, group)
        return rate

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, layer = self.state[parameter], parameter.ndim > 1
        direction = self.direction(parameter, gradient, state, group, layer)
        norms = (float(parameter.norm()), float(direction.norm())) if layer else None
        self.move(parameter, direction, state, group, self.rate(norms, group), layer)
