from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.errors import UsageError
from unisono.optimizers.layerwise import LAMB, LARS

RATE, MOMENTUM, TRUST = 0.5, 0.9, 0.02
FIRST, SECOND, EPSILON = 0.8, 0.95, 1e-6
DECAY = 0.1

numbers = st.floats(-3, 3, width=32).map(lambda value: round(value, 3))
rows = st.lists(numbers, min_size=3, max_size=3)


def naive_lars(weights: list[float], gradients: list[list[float]], layer: bool) -> list[float]:
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


def naive_lamb(weights: list[float], gradients: list[list[float]], layer: bool) -> list[float]:
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


def lars(parameter: torch.nn.Parameter) -> LARS:
    return LARS([parameter], RATE, MOMENTUM, DECAY, TRUST)


def lamb(parameter: torch.nn.Parameter) -> LAMB:
    return LAMB([parameter], RATE, (FIRST, SECOND), EPSILON, DECAY)


Make = Callable[[torch.nn.Parameter], torch.optim.Optimizer]


def made(make: Make, weights: list[float], gradients: list[list[float]], shape: tuple[int, ...]) -> list[float]:
    parameter = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float64).reshape(shape))
    optimizer = make(parameter)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64).reshape(shape)
        optimizer.step()
    return parameter.detach().flatten().tolist()


@pytest.mark.parametrize(("make", "naive"), [(lars, naive_lars), (lamb, naive_lamb)], ids=["lars", "lamb"])
@given(weights=rows, gradients=st.lists(rows, max_size=4))
def test_steps_follow_the_equations_for_layers_and_norms(
    make: Make, naive: Callable[..., list[float]], weights: list[float], gradients: list[list[float]]
) -> None:
    assert made(make, weights, gradients, (1, 3)) == pytest.approx(naive(weights, gradients, layer=True), abs=1e-9)
    assert made(make, weights, gradients, (3,)) == pytest.approx(naive(weights, gradients, layer=False), abs=1e-9)


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda parameter: LARS([parameter], lr=2), 3.99),
        (lambda parameter: LAMB([parameter], lr=0.01, weight_decay=0), 3.95),
    ],
    ids=["lars", "lamb"],
)
def test_the_worked_examples(make: Make, last: float) -> None:
    parameter = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    parameter.grad = torch.tensor([[0.0, 1.0]])
    make(parameter).step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([[3.0, last]]))


@pytest.mark.parametrize("kind", [LARS, LAMB])
@pytest.mark.parametrize("options", [{"lr": -1.0}, {"lr": math.nan}, {"weight_decay": -0.1}])
def test_options_out_of_their_range_are_refused(kind: type[LARS | LAMB], options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UsageError, match=rf"{name} = {value}, but it has to be at least 0"):
        kind([torch.nn.Parameter(torch.ones(2, 2))], **options)


def test_a_step_whose_closure_raises_leaves_no_sums_for_the_next() -> None:
    """Those of the next step may be of other ranks."""
    optimizer = LARS([torch.nn.Parameter(torch.ones(2, 2))])
    optimizer.sums = {"model": lambda steps: pytest.fail("of the step before")}

    def closure() -> float:
        raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        optimizer.step(closure)
    optimizer.step()


@pytest.mark.parametrize("betas", [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9)])
def test_shares_of_the_past_are_below_1(betas: tuple[float, float]) -> None:
    """LAMB divides by what is left."""
    with pytest.raises(UsageError, match=r"betas = .*, but each has to be at least 0 and below 1"):
        LAMB([torch.nn.Parameter(torch.ones(2, 2))], betas=betas)


@given(weights=rows, gradient=rows, factor=st.floats(0.01, 100))
def test_with_lars_the_norm_of_a_layers_gradient_does_not_matter(
    weights: list[float], gradient: list[float], factor: float
) -> None:
    """Without decay, a step has the rate times `trust` of the weights' length."""
    moves = []
    for times in (1.0, factor):
        parameter = torch.nn.Parameter(torch.tensor([weights], dtype=torch.float64))
        parameter.grad = times * torch.tensor([gradient], dtype=torch.float64)
        LARS([parameter], RATE, trust=TRUST).step()
        moves.append(parameter.detach()[0] - torch.tensor(weights, dtype=torch.float64))
    if any(weights) and any(gradient):
        torch.testing.assert_close(moves[0], moves[1], atol=1e-12, rtol=1e-9)
        assert float(moves[0].norm()) == pytest.approx(RATE * TRUST * math.hypot(*weights), abs=1e-12)


@given(weights=rows, gradients=st.lists(rows, min_size=1, max_size=3))
def test_with_lamb_the_rate_sets_the_length_of_a_layers_step(
    weights: list[float], gradients: list[list[float]]
) -> None:
    """It has that share of the weights' length, whatever the gradients are."""
    parameter = torch.nn.Parameter(torch.tensor([weights], dtype=torch.float64))
    optimizer = LAMB([parameter], RATE, weight_decay=DECAY)
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        if before.any():
            assert float((parameter.detach() - before).norm()) == pytest.approx(RATE * float(before.norm()))


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (
            lambda parameter: LARS([parameter], RATE, MOMENTUM, DECAY),
            lambda parameter: torch.optim.SGD([parameter], RATE, MOMENTUM),
        ),
        (
            lambda parameter: LAMB([parameter], RATE, weight_decay=DECAY),
            lambda parameter: torch.optim.Adam([parameter], RATE, eps=1e-6),
        ),
    ],
    ids=["lars", "lamb"],
)
def test_norms_and_biases_have_the_plain_step(make: Make, plain: Make) -> None:
    torch.manual_seed(0)
    actual, expected = (torch.nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2))
    optimizers = make(actual), plain(expected)
    for _ in range(5):
        actual.grad = torch.randn(4, dtype=torch.float64)
        expected.grad = actual.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_parameters_without_gradient_stay_and_a_closure_is_called(kind: type[LARS] | type[LAMB]) -> None:
    still, moved = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = kind([still, moved], RATE)

    def closure() -> float:
        loss = (moved * moved).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4
    assert torch.equal(still, torch.ones(2, 2))
    assert float(moved.detach().max()) < 1
    assert set(optimizer.state) == {moved}


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_complex_parameter_is_two_real_ones(kind: type[LARS] | type[LAMB]) -> None:
    numbers = torch.tensor([[1 + 2j, 3 - 1j], [2j, -1 + 1j]])
    as_complex, as_real = nn.Parameter(numbers.clone()), nn.Parameter(torch.view_as_real(numbers).clone())
    optimizers = kind([as_complex], 0.1), kind([as_real], 0.1)
    for step in range(3):
        as_complex.grad = numbers * (step + 1j)
        as_real.grad = torch.view_as_real(as_complex.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(torch.view_as_real(as_complex), as_real)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_norms_of_halves_are_summed_in_float32(kind: type[LARS] | type[LAMB]) -> None:
    parameter = nn.Parameter(torch.full((100, 100), 1000.0, dtype=torch.float16))  # the norm is 100,000
    parameter.grad = torch.ones_like(parameter)
    kind([parameter], 10).step()
    assert bool((parameter.detach().isfinite() & (parameter.detach() < 1000)).all())


def test_the_step_of_lamb_is_on_the_host_whatever_the_default_device() -> None:
    weights = nn.Parameter(torch.ones(2, 2))
    weights.grad = torch.ones(2, 2)
    with torch.device("meta"):
        LAMB([weights], RATE).step()
    assert not weights.eq(1).any()
