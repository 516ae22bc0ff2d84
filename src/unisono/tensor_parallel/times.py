"""Times of split layers while they train, by hooks around each call: products, and exchanges of activations.

    forward    begin ── copy ── product ── gather ── end          the layer's hooks before and after its forward
    backward   begin ── product ── sum ──────────── end           gradient of its output there; of its input made
                                   └ exchange: counted by the group's ExchangeTimes, what is left is the products

A layer whose input needs no gradient ends its backward pass with the gradient of its weight. Only passes that build a
graph in training count.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.world import World

MAX_CALLS_KEPT = 100
"""Largest number of calls whose times are kept."""


class ExchangeTimes:
    """Seconds since the start that exchanges of activations were waited for in a model group's world, which it is a
    resource of."""

    def __init__(self, _: World) -> None:
        self.seconds = 0.0

    def __deepcopy__(self, _: dict[int, Any]) -> ExchangeTimes:
        return self

    @contextmanager
    def count(self) -> Iterator[None]:
        """Add the time of the block."""
        begun = time.perf_counter()
        yield
        self.add(time.perf_counter() - begun)

    def add(self, seconds: float) -> None:
        """Add seconds."""
        self.seconds += seconds

    def close(self) -> None:
        """Do nothing."""


class PassTimes(NamedTuple):
    """Seconds of one pass of a layer."""

    products: float
    activations: float
    """Seconds that its exchange was waited for."""


class PassBegin(NamedTuple):
    """Beginning of a pass."""

    time: float
    """Time on `time.perf_counter`."""
    exchanged: float
    """Seconds of the group's exchanges by then."""


@dataclass
class LayerTimes:
    """Times of a split layer's newest calls."""

    exchange: ExchangeTimes
    forward: deque[PassTimes] = field(default_factory=lambda: deque(maxlen=MAX_CALLS_KEPT))
    backward: deque[PassTimes] = field(default_factory=lambda: deque(maxlen=MAX_CALLS_KEPT))
    inputs: Tensor | None = None
    """Input of the last call, on the meta device."""
    needs_gradient: bool = False
    """True where that input needs a gradient."""
    begun: PassBegin | None = None
    """Beginning of the pass that is running."""

    def begin(self) -> None:
        """Begin a pass."""
        self.begun = PassBegin(time.perf_counter(), self.exchange.seconds)

    def end(self, passes: deque[PassTimes]) -> None:
        """End the pass that has begun, if any: one of `passes`."""
        if self.begun is not None:
            exchanged = self.exchange.seconds - self.begun.exchanged
            passes.append(PassTimes(time.perf_counter() - self.begun.time - exchanged, exchanged))
        self.begun = None

    def medians(self) -> tuple[PassTimes, PassTimes] | None:
        """Return the medians of the forward and of the backward passes; None where none was made."""
        if not self.forward or not self.backward:
            return None
        return _median(self.forward), _median(self.backward)


class _EndOfBackward(torch.autograd.Function):
    """Identity of a layer's input, whose gradient ends the layer's backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: LayerTimes) -> Tensor:
        ctx.times = times
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.times.end(ctx.times.backward)
        return gradient, None


def time_passes(layer: nn.Module, weight: Tensor) -> None:
    """Time the calls of a layer that has `times`, and whose weight is `weight`."""
    times: LayerTimes = layer.times  # type: ignore[assignment]  # a module's attribute
    layer.register_forward_pre_hook(_begin_forward)
    layer.register_forward_hook(_end_forward)
    if weight.requires_grad:
        end = _end_with_weight(times)
        weight.register_post_accumulate_grad_hook(end)  # type: ignore[no-untyped-call]


def _begin_forward(layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    times: LayerTimes = layer.times
    times.begun = None
    if not (layer.training and torch.is_grad_enabled() and inputs and isinstance(inputs[0], Tensor)):
        return None
    x = inputs[0]
    times.inputs, times.needs_gradient = x.detach().to("meta"), x.requires_grad
    if x.requires_grad:
        x = _EndOfBackward.apply(x, times)
    times.begin()
    return (x, *inputs[1:])


def _end_forward(layer: Any, _: object, outputs: Tensor) -> None:
    times: LayerTimes = layer.times
    if times.begun is not None:
        times.end(times.forward)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: times.begin())  # type: ignore[no-untyped-call]


def _end_with_weight(times: LayerTimes) -> Callable[[Tensor], None]:
    """Return a hook that ends the backward pass of a layer whose input needs no gradient."""

    def end(_: Tensor) -> None:
        if not times.needs_gradient:
            times.end(times.backward)

    return end


def _median(passes: deque[PassTimes]) -> PassTimes:
    return PassTimes(median(one.products for one in passes), median(one.activations for one in passes))
