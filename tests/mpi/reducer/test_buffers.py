"""Floating-point buffers are rank 0's, so that all ranks begin each step alike."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import unisono
from unisono.world import World


class Centred(nn.Module):
    """Computes with a running centre, which it replaces in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 1)
        self.register_buffer("centre", torch.zeros(300))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(dim=0)
            self.count += len(inputs)
        return self.last(torch.tanh(self.norm(hidden) - self.centre))


def same(world: World, tensor: torch.Tensor) -> bool:
    """Whether all ranks have the same bits."""
    return len(set(world.all_gather_object(tensor.detach().numpy().tobytes()))) == 1


@pytest.mark.parametrize("where", ["group", "spread"])
def test_all_ranks_have_the_buffers_of_rank_0_after_each_backward_pass(
    where: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(where)
    model = unisono.parallel(
        Centred(), world, unisono.BSP(unisono.Exchange("ring", wire="bfloat16", bucket_bytes=2000))
    )
    plain = Centred()
    for step in range(8):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + world.rank))
        model(inputs).square().mean().backward()
        plain(torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step)))
        for mine, right in ((model.centre, plain.centre), (model.norm.running_var, plain.norm.running_var)):
            assert torch.equal(mine, right)
    assert model.count == 48


@pytest.mark.parametrize("overlap", ["auto", "chain", "concurrent", "funnel", "none"])
def test_a_trainer_waits_for_buffers_before_it_uses_them(spread: World, overlap: str) -> None:
    model = Centred().double()
    rule = unisono.BSP(unisono.Exchange(bucket_bytes=2000), overlap)
    trainer = unisono.Trainer(
        model, spread, rule, torch.optim.SGD(model.parameters(), 0.01), loss=lambda out, _: out.tanh().square().mean()
    )
    serial = [Centred().double() for _ in range(spread.size)]
    optimizers = [torch.optim.SGD(replica.parameters(), 0.01) for replica in serial]
    for step in range(30 if overlap == "auto" else 8):
        shares = [
            torch.randn(4 + rank, 4, generator=torch.Generator().manual_seed(10 * step + rank)).double()
            for rank in range(spread.size)
        ]
        mine = shares[spread.rank]
        trainer.step(mine, torch.zeros(len(mine)))
        for replica, share in zip(serial, shares, strict=True):
            replica.zero_grad()
            replica(share).tanh().square().mean().backward()
        total = sum(map(len, shares))
        for together in zip(*(replica.parameters() for replica in serial), strict=True):
            mean = sum(parameter.grad * len(share) / total for parameter, share in zip(together, shares, strict=True))
            for parameter in together:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for replica in serial[1:]:
            for name in ("centre", "norm.running_mean", "norm.running_var"):
                replica.get_buffer(name).copy_(serial[0].get_buffer(name))
    state = copy.deepcopy(model.state_dict())
    for name, right in serial[0].state_dict().items():
        if right.is_floating_point():
            assert torch.allclose(state[name], right, rtol=0, atol=1e-12), name
            assert same(spread, state[name])


@pytest.mark.parametrize("reads", ["anew", "in inference mode"])
def test_the_first_read_after_a_step_has_the_buffer_that_came(group: World, reads: str) -> None:
    model = Centred()
    trainer = unisono.Trainer(
        model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.01), loss=lambda out, _: out.square().mean()
    )
    for step in range(3):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)) + group.rank
        kept = model(inputs)  # a graph of the program's own
        trainer.step(inputs, torch.zeros(5))
        if reads == "anew":
            assert same(group, model.norm.running_mean)
            assert same(group, kept.detach()) == (group.size == 1)
        else:
            with torch.inference_mode():
                model.eval()(inputs)
            model.train()


def test_a_rank_without_a_batch_gets_the_gradients(group: World) -> None:
    model = unisono.parallel(Centred(), group)
    for _ in range(2):
        if group.rank == 0:
            model(torch.randn(6, 4)).square().mean().backward()
        else:
            unisono.synchronize(model)
        assert same(group, model.centre)
        assert same(group, model.norm.running_mean)


def test_several_forward_passes_before_several_backward_passes(group: World) -> None:
    model = unisono.parallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), group)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(3):
        losses = [model(torch.randn(6, 4, generator=generator)).square().mean() for _ in range(2)]
        for loss in losses:
            loss.backward()
        assert same(group, model[1].running_mean)


def test_buffers_made_by_expand(group: World) -> None:
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.full((1, 2), group.rank + 1.0).expand(3, 2))
    model.register_buffer("places", torch.tensor(group.rank + 5).expand(4))
    unisono.parallel(model, group)
    assert model.places.eq(5).all()
    for value in (1, 2):
        assert model.mask.eq(value).all()
        model.mask[0] += group.rank + 1
        model(torch.ones(3, 2) * model.mask.clone()).sum().backward()
    assert model.mask.stride() == (0, 1), "it has the memory of before"
