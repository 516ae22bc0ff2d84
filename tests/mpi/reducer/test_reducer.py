"""Parallel equals serial: gradients averaged over ranks are the gradients of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import UsageError
from unisono.reducer import reducer_of
from unisono.schedules.pieces import bounds
from unisono.world import World


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 7, generator=generator).double(), torch.randn(samples, 3, generator=generator).double()


def serial(samples: int) -> list[torch.Tensor]:
    model = make(0)
    inputs, targets = batch(samples)
    nn.functional.mse_loss(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def close(model: nn.Module, expected: list[torch.Tensor]) -> bool:
    return all(
        torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-14)
        for parameter, gradient in zip(model.parameters(), expected, strict=True)
    )


def test_all_ranks_begin_with_rank_0s_weights(group: World) -> None:
    model = unisono.parallel(make(group.rank), group)
    assert all(
        torch.equal(parameter, expected)
        for parameter, expected in zip(model.parameters(), make(0).parameters(), strict=True)
    )
    assert list(model.state_dict()) == list(make(0).state_dict())


@pytest.mark.parametrize("samples", [12, 13, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_uneven_shares_are_weighted(group: World, samples: int, bucket_bytes: int) -> None:
    model = unisono.parallel(make(0), group, unisono.BSP(unisono.Exchange(bucket_bytes=bucket_bytes)))
    inputs, targets = batch(samples)
    mine = slice(*bounds(samples, group.size, group.rank))
    for clear in (model.zero_grad, lambda: model.zero_grad(set_to_none=False)):
        clear()
        outputs = model(inputs[mine])
        unisono.add_samples(model, len(outputs))
        nn.functional.mse_loss(outputs, targets[mine]).backward()
        assert close(model, serial(samples))


def test_a_rank_without_samples_takes_part(group: World) -> None:
    model = unisono.parallel(make(0), group)
    inputs, targets = batch(6)
    model(inputs).sum().mul(float("nan")).backward()  # what was there before does not come back
    torch.optim.SGD(model.parameters(), 0.1).zero_grad()
    if group.rank == 0:
        nn.functional.mse_loss(model(inputs), targets).backward()
    else:
        unisono.synchronize(model)
    assert close(model, serial(6))


@pytest.mark.parametrize("absent", [True, False])
def test_an_average_stays_where_no_rank_has_samples(world: World, absent: bool) -> None:
    model, average = unisono.parallel(make(0), world), serial(6)
    for step in range(4):  # the first ones lay the buckets out anew
        model.zero_grad()
        inputs, targets = batch(6)
        unisono.add_samples(model, 6)
        nn.functional.mse_loss(model(inputs), targets).backward()
        if world.size > 1 and absent:
            unisono.synchronize(model)
        elif world.size > 1:
            unisono.add_samples(model, 0)
            model(inputs[:0]).sum().backward()
        assert close(model, average), step


def test_a_rank_that_is_alone_and_has_no_samples_has_no_gradients(world: World) -> None:
    """Those of an empty batch are not numbers, and the optimizer would apply them."""
    alone, model = world.split(world.rank), make(0)
    unisono.parallel(model, alone)
    for samples in (3, 0):
        model.zero_grad()
        unisono.add_samples(model, samples)
        model(torch.ones(samples, 7).double()).mean().backward()
        assert all((parameter.grad is not None) == (samples > 0) for parameter in model.parameters())
    alone.free()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_that_no_rank_uses_has_no_gradient_and_one_that_some_use_has(
    group: World, set_to_none: bool
) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False)])
    unisono.parallel(model, group)
    for _ in range(8):  # beyond the steps in which buckets change
        model.zero_grad(set_to_none)
        outputs = model[0](torch.full((3, 2), float(group.rank)))
        (outputs if group.rank else model[2](outputs)).sum().backward()
        assert all(parameter.grad is None for parameter in model[1].parameters()) or not set_to_none
        assert torch.allclose(
            model[0].bias.grad[0] * group.size, 3 * (group.size - 1) + 3 * model[2].weight[:, 0].sum()
        )
        expected = 3 * model[0].bias[None, :].expand(2, 2) / group.size
        assert torch.allclose(model[2].weight.grad, expected)


def test_frozen_parameters_and_halves(group: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
    model[0].requires_grad_(requires_grad=False)
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    unisono.parallel(model, group)
    model(torch.full((2, 4), float(group.rank), dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad.dtype is torch.bfloat16
    mean = (group.size - 1) / 2
    assert torch.allclose(model[1].weight.grad.float(), torch.full((2, 4), 2 * 4 * mean), rtol=2**-7)


def test_two_backward_passes_over_one_forward_pass(group: World) -> None:
    model = unisono.parallel(make(0), group)
    inputs, targets = batch(8)
    mine = slice(*bounds(8, group.size, group.rank))
    loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine])
    unisono.add_samples(model, len(inputs[mine]))
    loss.backward(retain_graph=True)
    unisono.add_samples(model, len(inputs[mine]))
    loss.backward()
    assert close(model, [2 * gradient for gradient in serial(8)])


def test_a_loop_of_old_may_turn_gradients_away_from_their_buckets(group: World) -> None:
    model = unisono.parallel(make(0), group, unisono.BSP(unisono.Exchange(bucket_bytes=1 << 20), overlap="chain"))
    inputs, targets = batch(6)
    for step in range(6):  # the first ones lay the buckets out anew
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
        nn.functional.mse_loss(model(inputs), targets).backward()
        assert close(model, serial(6)), step
        if step % 2:
            for parameter in model.parameters():
                parameter.grad.data = 2 * parameter.grad.data


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_gradients_that_the_program_swaps_or_transposes_are_added_to(group: World) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    serial, inputs = copy.deepcopy(model), torch.randn(3, 4).double()
    unisono.parallel(model, group, unisono.BSP(unisono.Exchange(bucket_bytes=1 << 20), overlap="chain"))
    for step in range(4):  # the first ones lay the buckets out anew
        for network in (model, serial):
            network.zero_grad()
            network(inputs).square().mean().backward()
            first, second, third = (layer.weight for layer in network[::2])
            first.grad, second.grad, third.grad = second.grad, first.grad, third.grad.t()
            network(inputs.cos()).sin().mean().backward()
        assert close(model, [parameter.grad for parameter in serial.parameters()]), step


def test_a_graph_that_has_kept_an_average_notices_the_next_one(group: World) -> None:
    if group.size == 1:
        pytest.skip("one rank has no average: PyTorch's own gradients are others in each pass")
    model, weights = nn.Linear(3, 2), torch.ones(2, 3, requires_grad=True)
    unisono.parallel(model, group)
    model(torch.ones(4, 3)).sum().backward()
    penalty = (weights * model.weight.grad).sum()
    model.zero_grad()
    model(3 * torch.ones(4, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_a_copy_of_the_model_is_a_model_of_its_own(group: World) -> None:
    model = unisono.parallel(make(0), group)
    duplicate = copy.deepcopy(model)
    assert reducer_of(duplicate) is None
    if group.rank == 0:  # alone: nothing is exchanged
        duplicate(torch.ones(2, 7).double()).sum().backward()


def test_several_losses_in_one_step(group: World) -> None:
    model = unisono.parallel(make(0), group)
    inputs, targets = batch(8)
    mine = slice(*bounds(8, group.size, group.rank))
    model.zero_grad()
    for _ in range(2):
        unisono.add_samples(model, len(inputs[mine]))
        nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
    assert close(model, [2 * gradient for gradient in serial(8)])


def test_making_a_model_parallel_twice(group: World) -> None:
    model = unisono.parallel(make(0), group)
    with pytest.raises(UsageError, match="parallel already"):
        unisono.parallel(model, group)


def test_gradients_are_sent_in_a_wire_format(spread: World) -> None:
    rule = unisono.BSP(unisono.Exchange("ring", wire="bfloat16"))
    model = unisono.parallel(torch.nn.Linear(300, 50, bias=False), spread, rule)
    data = torch.randn(8, 300, generator=torch.Generator().manual_seed(spread.rank))
    model(data).sum().backward()
    plain = torch.stack([row.sum(dim=0) for row in spread.all_gather_object(data)]).mean(dim=0)
    grad = model.weight.grad[0]
    assert torch.allclose(grad, plain, rtol=0.05, atol=0.1)
    if spread.size > 1:
        assert torch.equal(grad, grad.bfloat16().float()), "what has travelled is rounded"
