from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.optimizers import OPTIMIZERS, by_decay, make_optimizer


def linear(bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1, bias).double()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_decay_and_biases_do_not(name: str) -> None:
    model = linear()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = make_optimizer(name, model, 0.1, 0.0, 0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (model.weight.abs() < before["weight"].abs()).all()
    assert torch.equal(model.bias, before["bias"])


@pytest.mark.parametrize(("name", "rate"), [("sgd", 0.1), ("lars", 3.0), ("lamb", 0.02), ("adamw", 0.05)])
def test_each_optimizer_recovers_known_weights(name: str, rate: float) -> None:
    model = linear(bias=False)
    optimizer = make_optimizer(name, model, rate, 0.9, 0.0)
    inputs = torch.randn(64, 3, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64)
    losses = []
    for _ in range(400):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rate_and_momentum(name: str) -> None:
    for group in make_optimizer(name, linear(), 0.25, 0.75, 0.5).param_groups:
        assert group["lr"] == 0.25
        assert name == "adamw" or (group["betas"][0] if name == "lamb" else group["momentum"]) == 0.75


def test_betas_are_those_of_adamw() -> None:
    groups = make_optimizer("adamw", linear(), 0.25, 0.75, 0.5, betas=(0.8, 0.9)).param_groups
    assert [group["betas"] for group in groups] == [(0.8, 0.9)] * 2
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]


def test_nesterov_momentum_is_pytorchs() -> None:
    actual, expected = linear(), linear()
    mine = make_optimizer("sgd", actual, 0.1, 0.9, 0.0, nesterov=True)
    its = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9, nesterov=True)
    for _ in range(5):
        for model, optimizer in ((actual, mine), (expected, its)):
            optimizer.zero_grad()
            model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(actual.parameters(), expected.parameters(), strict=True))


def test_all_optimizers_are_tested() -> None:
    assert set(OPTIMIZERS) == {"sgd", "adamw", "lars", "lamb"}


shapes = st.lists(st.integers(1, 3), max_size=4).map(tuple)


@given(kinds=st.lists(st.tuples(shapes, st.booleans()), max_size=8))
def test_each_trainable_parameter_is_in_its_group(kinds: list[tuple[tuple[int, ...], bool]]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape), requires_grad=learns) for shape, learns in kinds]
    groups = by_decay(parameters, 0.3)
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert decays == {
        id(parameter): 0.3 if parameter.ndim > 1 else 0.0 for parameter in parameters if parameter.requires_grad
    }
    assert all(group["params"] for group in groups), "none is empty"
    assert sum(len(group["params"]) for group in groups) == len(decays), "none is there twice"


def test_a_network_with_norms() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 2))
    decaying, others = by_decay(model.parameters(), 5e-4)
    assert [tuple(parameter.shape) for parameter in decaying["params"]] == [(8, 3, 3, 3), (2, 8)]
    assert [tuple(parameter.shape) for parameter in others["params"]] == [(8,), (8,), (8,), (2,)]
