"""Network of real parameters whose computing is slept: each layer takes as long as a plan says.

forward    layer 0 ─ layer 1 ─ ...      each sleeps, reads its weights
backward   ... ─ layer 1 ─ layer 0      each sleeps, then has its gradient

On a busy machine each sleep ends late. What one sleep is too long, the next is shorter; the clock stands still while
the step waits, so that waiting is never made up for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, network: SleptNetwork, layer: int) -> torch.Tensor:
        ctx.shape, ctx.network, ctx.layer = weight.shape, network, layer
        if layer == 0:
            network.begin()
        network.sleep(network.forward_seconds[layer])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        network = ctx.network
        if ctx.layer == len(network.forward_seconds) - 1:
            network.begin()
        network.sleep(network.backward_seconds[ctx.layer])
        return gradient, torch.ones(ctx.shape), None, None


class SleptNetwork(nn.Module):
    """Layers with `sizes` float32 parameters each, whose passes take so many seconds."""

    def __init__(self, sizes: Sequence[int], forward: Sequence[float], backward: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.value = nn.Parameter(torch.zeros(1))  # so that the first layer has something to pass on
        self.forward_seconds, self.backward_seconds = forward, backward
        self.clock: Callable[[], float] = time.perf_counter
        self._due = 0.0

    def begin(self) -> None:
        """Begin the first layer of a pass."""
        self._due = self.clock()

    def sleep(self, seconds: float) -> None:
        """Sleep for a layer's computing."""
        self._due += seconds
        time.sleep(max(0.0, self._due - self.clock()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one score for each sample."""
        value = inputs * self.value
        for layer, weight in enumerate(self.weights):
            value = _Sleeping.apply(value, weight, self, layer)
        return value.sum(dim=1)
