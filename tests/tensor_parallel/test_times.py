"""A layer's times have its products and its exchanges apart, in both passes, by a clock that the test moves."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unisono.tensor_parallel import times
from unisono.tensor_parallel.times import ExchangeTimes, LayerTimes, PassTimes, time_passes


class Clock:
    """Seconds that pass only where a layer lets them."""

    def __init__(self) -> None:
        self.now = 0.0


class Slow(torch.autograd.Function):
    """x * weight, 3 s forward with 2 s of exchange after it, 5 s backward with 7 s of exchange after it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, clock: Clock, exchange: ExchangeTimes) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.clock, ctx.exchange = clock, exchange
        clock.now += 3
        with exchange.count():
            clock.now += 2
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.clock.now += 5
        with ctx.exchange.count():
            ctx.clock.now += 7
        return gradient * weight if ctx.needs_input_grad[0] else None, (gradient * x).sum(0), None, None


class Layer(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.clock, self.times = clock, LayerTimes(ExchangeTimes(None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x, self.weight, self.clock, self.times.exchange)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(times, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def timed(clock: Clock) -> Layer:
    layer = Layer(clock)
    time_passes(layer, layer.weight)
    return layer


def test_products_and_exchanges_of_both_passes(clock: Clock) -> None:
    first, last = timed(clock), timed(clock)
    relu = nn.ReLU(inplace=True)
    for _ in range(3):
        y = relu(first(torch.ones(2, 4)))
        clock.now += 100
        last(y).sum().backward()
        clock.now += 100
    for layer in (first, last):  # the first one's input needs no gradient
        assert list(layer.times.forward) == [PassTimes(3.0, 2.0)] * 3
        assert layer.times.medians() == (PassTimes(3.0, 2.0), PassTimes(5.0, 7.0))
    assert (first.times.needs_gradient, last.times.needs_gradient) == (False, True)
    assert last.times.inputs is not None
    assert (last.times.inputs.shape, last.times.inputs.device.type) == ((2, 4), "meta")


def test_gradients_are_what_they_are_without_times(clock: Clock) -> None:
    plain, layer = Layer(clock), timed(clock)
    inputs = [torch.arange(8.0).view(2, 4).requires_grad_() for _ in range(2)]
    for x, one in zip(inputs, (plain, layer), strict=True):
        (one(x * 2) ** 2).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(plain.weight.grad, layer.weight.grad)


def test_only_training_counts(clock: Clock) -> None:
    layer = timed(clock)
    with torch.no_grad():
        layer(torch.ones(2, 4))
    layer.eval()
    layer(torch.ones(2, 4)).sum().backward()
    assert layer.times.medians() is None
    assert not layer.times.forward
    assert not layer.times.backward


def test_a_copy_has_times_of_its_own(clock: Clock) -> None:
    layer = timed(clock)
    layer(torch.ones(2, 4)).sum().backward()
    other = copy.deepcopy(layer)
    other(torch.ones(2, 4))
    assert (len(layer.times.forward), len(other.times.forward)) == (1, 2)
    assert other.times.exchange is layer.times.exchange
