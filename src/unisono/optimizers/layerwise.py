"""Optimizers that scale the rate of each layer by two norms, LARS and LAMB: a step in three parts.

    direction    elementwise: what the weights are moved along, before the scale
    norms        of a layer's weights and of its direction; of parts and shards, from sums over the ranks
    move         elementwise: state and weights

Parameters of one dimension (norms, biases) are no layers: their rate is the group's, and they do not decay. Nor is the
rate scaled for layers of which either norm is 0.

LARS (You, Gitman and Ginsburg 2017): SGD, with each layer's rate proportional to its weights' norm over its gradient's.

    v = momentum v + rate scale (g + decay w),    w = w - v,    scale = trust |w| / (|g| + decay |w|)

For w = [[3, 4]] and g = [[0, 1]] without decay: |w| = 5, |g| = 1, the scale is 0.001 x 5 / 1; at a rate of 2 the first
step is 2 x 0.005 g, and w = [[3, 3.99]].

LAMB (You et al. 2020, algorithm 2): Adam's step, with a length proportional to the norm of each layer's weights.

    m = b1 m + (1 - b1) g,    v = b2 v + (1 - b2) g g
    u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w,    w = w - rate |w| / |u| u          in step t

For the same w and g: in the first step u = [[0, 1]], as Adam's is, up to eps; at a rate of 0.01 the step is
0.01 x 5 / 1 u, and w = [[3, 3.95]].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import UsageError

State = dict[str, Any]
"""State of an optimizer for a parameter, or options of a group, by name."""


class ParameterStep(NamedTuple):
    """Step of a parameter, before it moves."""

    parameter: Tensor
    direction: Tensor
    group: State
    norms: tuple[float, float] | None
    """Norms of its weights and its direction; None for what is no layer."""


SumNorms = Callable[[Iterable[ParameterStep]], Iterable[ParameterStep]]
"""Function that returns steps of parts of layers with the norms of the whole layers. Called by all ranks together."""


class LayerwiseOptimizer(torch.optim.Optimizer):
    """Base of optimizers whose rate is scaled layer by layer. Its methods take a parameter's weights, or a part."""

    sums: Mapping[object, SumNorms] = {}
    """Functions that complete the norms of the next step, by the models that have parts of layers."""

    def __init__(self, params: Iterable[Any], defaults: State) -> None:
        """Raise UsageError for options out of their range."""
        for name, value in defaults.items():
            if name == "betas" and not all(0 <= beta < 1 for beta in value):
                raise UsageError(f"betas = {value}, but each has to be at least 0 and below 1")
            if name != "betas" and not value >= 0:
                raise UsageError(f"{name} = {value}, but it has to be at least 0")
        super().__init__(params, defaults)

    @abstractmethod
    def direction(self, weights: Tensor, gradient: Tensor, state: State, group: State, layer: bool) -> Tensor:
        """Return the direction of the step, and update the state that it depends on. `layer`: True for a layer."""

    @abstractmethod
    def scale(self, weights: float, direction: float, group: State) -> float:
        """Return the factor of a layer's rate, from the norms of its weights and its direction, both above 0."""

    def move(self, weights: Tensor, direction: Tensor, _: State, __: State, rate: float, ___: bool) -> None:
        """Move weights along a direction, in place, at a rate that is scaled already. The others are those of
        `direction`."""
        weights.sub_(direction, alpha=rate)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Return the loss of `closure`, which computes them, if given."""
        sums, self.sums = self.sums, {}  # first: a closure may raise
        loss = None if closure is None else torch.enable_grad()(closure)()
        steps: Iterable[ParameterStep] = self._measured()
        for sum_norms in sums.values():
            steps = sum_norms(steps)
        for parameter, direction, group, norms in steps:
            self.move(parameter, direction, self.state[parameter], group, self.rate(norms, group), norms is not None)
        return loss

    def _measured(self) -> Iterator[ParameterStep]:
        """Yield the step of each parameter that has a gradient: one direction at a time is in memory."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    layer = parameter.ndim > 1
                    direction = self.direction(parameter, parameter.grad, self.state[parameter], group, layer)
                    norms = (float(norm(parameter)), float(norm(direction))) if layer else None
                    yield ParameterStep(parameter, direction, group, norms)

    def rate(self, norms: tuple[float, float] | None, group: State) -> float:
        """Return the rate for a layer with these norms of weights and direction; None for what is no layer."""
        rate: float = group["lr"]
        if norms is not None and norms[0] > 0 and norms[1] > 0:
            rate = rate * self.scale(*norms, group)
        return rate


def norm(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor, summed in float32 at least: that of halves may be beyond their range."""
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return found


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

    def direction(self, weights: Tensor, gradient: Tensor, state: State, _: State, __: bool) -> Tensor:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        return gradient

    def scale(self, weights: float, direction: float, group: State) -> float:
        """Return trust |w| / (|g| + decay |w|)."""
        factor: float = group["trust"] * weights / (direction + group["weight_decay"] * weights)
        return factor

    def move(self, weights: Tensor, direction: Tensor, state: State, group: State, rate: float, layer: bool) -> None:
        """Subtract the velocity from the weights, with decay for a layer."""
        velocity = state["momentum_buffer"].mul_(group["momentum"])
        if layer:
            velocity.add_(weights, alpha=rate * group["weight_decay"])
        weights.sub_(velocity.add_(direction, alpha=rate))


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

    def direction(self, weights: Tensor, gradient: Tensor, state: State, group: State, layer: bool) -> Tensor:
        """Return Adam's step u, for a layer with its decay."""
        if not state:
            state["step"] = torch.zeros((), device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        first, second = group["betas"]
        state["step"] += 1
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
        if is_complex := weights.is_complex():  # two numbers each, as in PyTorch's Adam; shards have them apart
            weights, gradient, mean, square = map(torch.view_as_real, (weights, gradient, mean, square))
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step: Tensor = (mean / (1 - first**steps)).div_((square / (1 - second**steps)).sqrt_().add_(group["eps"]))
        step = step.add_(weights, alpha=group["weight_decay"]) if layer else step
        return torch.view_as_complex(step) if is_complex else step

    def scale(self, weights: float, direction: float, _: State) -> float:
        """Return |w| / |u|."""
        return weights / direction
