from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.optimizers.lars import LARS

RATE, MOMENTUM, DECAY, TRUST = 0.5, 0.9, 0.1, 0.02

numbers = st.floats(-3, 3, width=32).map(lambda number: round(number, 3))
rows = st.lists(numbers, min_size=3, max_size=3)


def naive(weights: list[float], gradients: list[list[float]], layer: bool) -> list[float]:
    """The equations, number by number."""
    velocity = [0.0] * len(weights)
    for gradient in gradients:
        size, slope = math.hypot(*weights), math.hypot(*gradient)
        decay = DECAY if layer else 0.0
        scale = TRUST * size / (slope + decay * size) if layer and size and slope else 1.0
        for place, (weight, change) in enumerate(zip(weights, gradient, strict=True)):
            velocity[place] = MOMENTUM * velocity[place] + RATE * scale * (change + decay * weight)
        weights = [weight - speed for weight, speed in zip(weights, velocity, strict=True)]
    return weights


def made(weights: list[float], gradients: list[list[float]], shape: tuple[int, ...]) -> list[float]:
    parameter = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float64).reshape(shape))
    optimizer = LARS([parameter], RATE, MOMENTUM, DECAY, TRUST)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64).reshape(shape)
        optimizer.step()
    return parameter.detach().flatten().tolist()


@settings(deadline=None)
@given(weights=rows, gradients=st.lists(rows, max_size=4))
def test_steps_follow_the_equations_for_layers_and_norms(weights: list[float], gradients: list[list[float]]) -> None:
    assert made(weights, gradients, (1, 3)) == pytest.approx(naive(weights, gradients, layer=True), abs=1e-12)
    assert made(weights, gradients, (3,)) == pytest.approx(naive(weights, gradients, layer=False), abs=1e-12)


def test_the_worked_example() -> None:
    parameter = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    parameter.grad = torch.tensor([[0.0, 1.0]])
    LARS([parameter], lr=2).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([[3.0, 3.99]]))


@settings(deadline=None)
@given(weights=rows, gradient=rows, factor=st.floats(0.01, 100))
def test_the_norm_of_a_layers_gradient_does_not_matter(
    weights: list[float], gradient: list[float], factor: float
) -> None:
    """Without decay, a step has the rate times `trust` of the weights' length."""
    found = []
    for times in (1.0, factor):
        parameter = torch.nn.Parameter(torch.tensor([weights], dtype=torch.float64))
        parameter.grad = times * torch.tensor([gradient], dtype=torch.float64)
        LARS([parameter], RATE, trust=TRUST).step()
        found.append(parameter.detach()[0] - torch.tensor(weights, dtype=torch.float64))
    if any(weights) and any(gradient):
        torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=1e-9)
        assert float(found[0].norm()) == pytest.approx(RATE * TRUST * math.hypot(*weights), abs=1e-12)


def test_norms_and_biases_have_plain_sgd() -> None:
    torch.manual_seed(0)
    one, other = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    optimizers = LARS([one], RATE, MOMENTUM, DECAY), torch.optim.SGD([other], RATE, MOMENTUM)
    for _ in range(5):
        one.grad = torch.randn(4, dtype=torch.float64)
        other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(one, other)


def test_parameters_without_gradient_stay_and_a_closure_is_called() -> None:
    still, moved = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = LARS([still, moved], RATE)

    def closure() -> float:
        loss = (moved * moved).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4
    assert torch.equal(still, torch.ones(2, 2))
    assert float(moved.detach().max()) < 1
    assert set(optimizer.state) == {moved}
