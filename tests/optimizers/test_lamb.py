from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.optimizers.lamb import LAMB

RATE, FIRST, SECOND, EPSILON, DECAY = 0.1, 0.8, 0.95, 1e-6, 0.05

numbers = st.floats(-3, 3, width=32).map(lambda number: round(number, 3))
rows = st.lists(numbers, min_size=3, max_size=3)


def naive(weights: list[float], gradients: list[list[float]], layer: bool) -> list[float]:
    """The equations, number by number."""
    mean, square = [0.0] * len(weights), [0.0] * len(weights)
    for step, gradient in enumerate(gradients, 1):
        update = []
        for place, (weight, change) in enumerate(zip(weights, gradient, strict=True)):
            mean[place] = FIRST * mean[place] + (1 - FIRST) * change
            square[place] = SECOND * square[place] + (1 - SECOND) * change * change
            high, low = mean[place] / (1 - FIRST**step), math.sqrt(square[place] / (1 - SECOND**step)) + EPSILON
            update.append(high / low + (DECAY * weight if layer else 0.0))
        size, length = math.hypot(*weights), math.hypot(*update)
        scale = size / length if layer and size and length else 1.0
        weights = [weight - RATE * scale * each for weight, each in zip(weights, update, strict=True)]
    return weights


def made(weights: list[float], gradients: list[list[float]], shape: tuple[int, ...]) -> list[float]:
    parameter = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float64).reshape(shape))
    optimizer = LAMB([parameter], RATE, (FIRST, SECOND), EPSILON, DECAY)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64).reshape(shape)
        optimizer.step()
    return parameter.detach().flatten().tolist()


@settings(deadline=None)
@given(weights=rows, gradients=st.lists(rows, max_size=4))
def test_steps_follow_the_equations_for_layers_and_norms(weights: list[float], gradients: list[list[float]]) -> None:
    assert made(weights, gradients, (1, 3)) == pytest.approx(naive(weights, gradients, layer=True), abs=1e-9)
    assert made(weights, gradients, (3,)) == pytest.approx(naive(weights, gradients, layer=False), abs=1e-9)


def test_the_worked_example() -> None:
    parameter = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    parameter.grad = torch.tensor([[0.0, 1.0]])
    LAMB([parameter], lr=0.01, weight_decay=0).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([[3.0, 3.95]]))


@settings(deadline=None)
@given(weights=rows, gradients=st.lists(rows, min_size=1, max_size=3))
def test_the_rate_sets_the_length_of_a_layers_step(weights: list[float], gradients: list[list[float]]) -> None:
    """It has that share of the weights' length, whatever the gradients are."""
    parameter = torch.nn.Parameter(torch.tensor([weights], dtype=torch.float64))
    optimizer = LAMB([parameter], RATE, weight_decay=DECAY)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        if before.any():
            assert float((parameter.detach() - before).norm()) == pytest.approx(RATE * float(before.norm()))


def test_norms_and_biases_have_adams_step() -> None:
    torch.manual_seed(0)
    one, other = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    optimizers = LAMB([one], RATE, weight_decay=DECAY), torch.optim.Adam([other], RATE, eps=1e-6)
    for _ in range(5):
        one.grad = torch.randn(4, dtype=torch.float64)
        other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(one, other)


def test_parameters_without_gradient_stay_and_a_closure_is_called() -> None:
    still, moved = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = LAMB([still, moved], RATE)

    def closure() -> float:
        loss = (moved * moved).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4
    assert torch.equal(still, torch.ones(2, 2))
    assert float(moved.detach().max()) < 1
    assert set(optimizer.state) == {moved}
