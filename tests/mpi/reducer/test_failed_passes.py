"""A backward pass that fails and is caught leaves nothing behind; the program's own hooks see the gradients."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import unisono
from unisono.world import World


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("out of luck")


class Deep(nn.Module):
    """Fails in the backward pass below one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5)).double()
        self.fails = -1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            inputs = torch.tanh(layer(inputs))
            if index == self.fails:
                inputs = Failing.apply(inputs)
        return inputs


def make(world: World, overlap: str) -> nn.Module:
    return unisono.parallel(Deep(), world, unisono.BSP(unisono.Exchange(bucket_bytes=20_000), overlap))


def inputs_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)).double()


def serial(ranks: int) -> list[torch.Tensor]:
    model = Deep()
    for rank in range(ranks):
        (model(inputs_of(rank)).square().mean() / ranks).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_failed_pass_is_no_step_of_the_search(group: World) -> None:
    """Its exchanges would meet others: ranks make as many steps, whatever they try."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    unisono.parallel(model, group, unisono.LocalSGD(every=1), optimizer)
    for step in range(40):
        if group.rank == 0 and step % 5 == 2:
            model.fails = 1
            with pytest.raises(ValueError, match="out of luck"):
                model(inputs_of(group.rank)).square().mean().backward()
            model.fails = -1
        optimizer.zero_grad()
        model(inputs_of(group.rank)).square().mean().backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(mine, other) for other in group.all_gather_object(mine))


@pytest.mark.parametrize("overlap", ["chain", "concurrent", "funnel", "none"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_pass_after_a_failed_one_is_exact(group: World, overlap: str, set_to_none: bool) -> None:
    model, right = make(group, overlap), serial(group.size)
    for fails, pause in ((4, 0.0), (2, 0.0), (0, 0.0), (3, 0.1), (1, 0.0)):
        model.fails = fails
        with pytest.raises(ValueError, match="out of luck"):
            model(inputs_of(group.rank)).square().mean().backward()
        model.zero_grad(set_to_none)
        time.sleep(pause)
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
        model.fails = -1
        model(inputs_of(group.rank)).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), right, strict=True):
            assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-15)
        model.zero_grad(set_to_none)


@pytest.mark.parametrize("overlap", ["chain", "funnel"])
def test_a_trainers_step_that_fails(group: World, overlap: str) -> None:
    model = Deep()
    trainer = unisono.Trainer(
        model,
        group,
        unisono.BSP(unisono.Exchange(bucket_bytes=20_000), overlap),
        torch.optim.SGD(model.parameters(), 1.0),
        loss=lambda out, _: out.square().mean(),
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.fails = 4
    with pytest.raises((ValueError, unisono.UnisonoError), match="out of luck"):
        trainer.step(inputs_of(group.rank), torch.zeros(4))
    model.fails = -1
    trainer.step(inputs_of(group.rank), torch.zeros(4))
    trainer.wait()
    for parameter, start, gradient in zip(model.parameters(), before, serial(group.size), strict=True):
        assert torch.allclose(parameter, start - gradient, rtol=0, atol=1e-14)


def test_samples_and_requests_of_a_failed_pass(group: World) -> None:
    model, right = make(group, "chain"), serial(group.size)
    model.fails = 1
    unisono.add_samples(model, 100 * (group.rank + 1))
    with pytest.raises(ValueError, match="out of luck"):
        model(inputs_of(group.rank)).square().mean().backward()
    model.zero_grad()
    model.fails = -1
    unisono.add_samples(model, 4)
    model(inputs_of(group.rank)).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-15)


@pytest.mark.parametrize("overlap", ["chain", "none"])
def test_user_hooks_see_the_gradient_and_may_change_it(group: World, overlap: str) -> None:
    model, right = make(group, overlap), serial(group.size)
    seen: list[torch.Tensor | None] = []

    def twice(parameter: torch.Tensor) -> None:
        seen.append(parameter.grad)
        if parameter.grad is not None:
            parameter.grad.mul_(2)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(twice)
    for _ in range(3):
        model.zero_grad()
        model(inputs_of(group.rank)).square().mean().backward()
        for parameter, gradient in zip(model.parameters(), right, strict=True):
            assert torch.allclose(parameter.grad, 2 * gradient, rtol=0, atol=1e-15)
    model.zero_grad()
    with unisono.no_sync(model):
        model(inputs_of(group.rank)).square().mean().backward()
    model(inputs_of(group.rank)).square().mean().backward()
    assert len(seen) == 5 * len(right)
    assert all(gradient is not None for gradient in seen)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        assert torch.allclose(parameter.grad, 6 * gradient, rtol=0, atol=1e-14)  # 2 (2 g + g)
