"""Weights of ranks come from the given samples."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import UsageError
from unisono.world import World


def make() -> nn.Module:
    """Its gradient is the mean of its inputs."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    return model


def mean(model: nn.Module, samples: int, value: float) -> torch.Tensor:
    return model(torch.full((samples, 1), value).double()).sum() / max(1, samples)


def step(model: nn.Module, samples: int, value: float, say: bool = True) -> float:
    """The averaged gradient."""
    model.zero_grad()
    loss = mean(model, samples, value)
    if say:
        unisono.add_samples(model, samples)
    loss.backward()
    return float(model.weight.grad)


def weighted(samples: list[int]) -> float:
    """The mean over all samples, where those of rank r are r + 1."""
    return sum(count * (rank + 1) for rank, count in enumerate(samples)) / sum(samples)


def test_equal_weights_without_given_samples(group: World) -> None:
    model = unisono.parallel(make(), group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert step(model, 2 + group.rank, group.rank + 1.0, say=False) == pytest.approx((group.size + 1) / 2)


def test_an_empty_batch_counts_nothing(group: World) -> None:
    model = unisono.parallel(make(), group)
    assert step(model, 8, group.rank + 1.0) == pytest.approx((group.size + 1) / 2)
    assert step(model, 0 if group.rank else 8, group.rank + 1.0) == 1.0
    model.zero_grad()
    unisono.add_samples(model, 0 if group.rank else 8)
    model(torch.full((0 if group.rank else 8, 1), 3.0).double()).mean().backward()  # not a number where it is empty
    assert float(model.weight.grad) == 3.0


def test_no_samples_on_any_rank(group: World) -> None:
    model = unisono.parallel(make(), group)
    unisono.add_samples(model, 0)
    mean(model, 0, 1.0).backward()
    assert model.weight.grad is None or float(model.weight.grad) == 0.0
    assert step(model, 4, group.rank + 1.0) == pytest.approx((group.size + 1) / 2)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("call", ["whole", "layers"])
def test_eval_mode_and_layers_called_directly(group: World, train: bool, call: str) -> None:
    torch.manual_seed(0)
    model = unisono.parallel(nn.Sequential(make(), nn.Tanh()).train(train), group)
    samples = [2 + 8 * rank for rank in range(group.size)]
    for counts in (samples, [4] * group.size, samples):
        model.zero_grad()
        given = torch.full((counts[group.rank], 1), group.rank + 1.0).double()
        loss = (model(given) if call == "whole" else model[1](model[0](given))).mean()
        unisono.add_samples(model, counts[group.rank])
        loss.backward()
        slopes = [(rank + 1) * (1 - math.tanh(rank + 1) ** 2) for rank in range(group.size)]
        right = sum(count * slope for count, slope in zip(counts, slopes, strict=True)) / sum(counts)
        assert float(model[0].weight.grad) == pytest.approx(right, abs=1e-14)


def test_a_forward_pass_alone_adds_no_weight(group: World) -> None:
    model = unisono.parallel(make(), group)
    if group.rank == 0:
        mean(model, 600, 5.0)
    samples = [2 + rank for rank in range(group.size)]
    assert step(model, samples[group.rank], group.rank + 1.0) == pytest.approx(weighted(samples))


def test_samples_add_up_until_the_next_average(group: World) -> None:
    model = unisono.parallel(make(), group)
    samples = [3 + 2 * rank for rank in range(group.size)]
    with unisono.no_sync(model):
        unisono.add_samples(model, 1)
        (mean(model, 1, group.rank + 1.0) / samples[group.rank]).backward()
    rest = samples[group.rank] - 1
    unisono.add_samples(model, rest)
    (mean(model, rest, group.rank + 1.0) * rest / samples[group.rank]).backward()
    assert float(model.weight.grad) == pytest.approx(weighted(samples))


@pytest.mark.parametrize("said", [True, False])
def test_a_rank_without_a_batch_contributes_accumulated_gradients(group: World, said: bool) -> None:
    model = unisono.parallel(make(), group)
    for _ in range(2):
        model.zero_grad()
        with unisono.no_sync(model):
            mean(model, 2, group.rank + 1.0).backward()
        if said:
            unisono.add_samples(model, 2)
        unisono.synchronize(model)
        assert float(model.weight.grad) == pytest.approx((group.size + 1) / 2)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_rank_without_anything_is_absent(group: World, set_to_none: bool) -> None:
    model = unisono.parallel(make(), group)
    step(model, 4, 7.0)
    for say in (True, False):
        model.zero_grad(set_to_none)
        if group.rank == 0:
            if say:
                unisono.add_samples(model, 3)
            mean(model, 3, 2.0).backward()
        else:
            unisono.synchronize(model)
        assert float(model.weight.grad) == 2.0


def test_samples_given_on_some_ranks_only(group: World) -> None:
    if group.size == 1:
        return
    model = unisono.parallel(make(), group)
    match = f"rank{'s' if group.size > 2 else ''} 1.* not given the number of samples .* unisono.add_samples"
    for _ in range(2):
        with pytest.raises(UsageError, match=match):
            step(model, 4, 1.0, say=group.rank == 0)
        assert model.weight.grad is None
        assert step(model, 4, group.rank + 1.0) == pytest.approx((group.size + 1) / 2)


def test_rank_0_warns_once_if_input_sizes_differ_without_given_samples(group: World) -> None:
    model = unisono.parallel(make(), group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, 4, 1.0, say=False)
        step(model, 4 + group.rank, 1.0)
        assert not caught
        step(model, 4 + group.rank, 1.0, say=False)
        step(model, 4 + group.rank, 1.0, say=False)
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (1 if group.rank == 0 and group.size > 1 else 0)
    assert all("first dimensions" in text and "unisono.add_samples(model, n)" in text for text in texts)


@pytest.mark.parametrize("samples", [-1, math.nan, math.inf])
def test_invalid_numbers_of_samples(group: World, samples: float) -> None:
    model = unisono.parallel(make(), group)
    with pytest.raises(UsageError, match="0 or more"):
        unisono.add_samples(model, samples)
    with pytest.raises(UsageError, match="not parallel"):
        unisono.add_samples(nn.Linear(1, 1), 3)
    with pytest.raises(UsageError, match="not parallel"):
        unisono.synchronize(nn.Linear(1, 1))


def test_requests_reach_all_ranks_with_the_next_step(group: World) -> None:
    model = make()
    trainer = unisono.Trainer(
        model, group, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1), loss=lambda scores, _: scores.mean()
    )
    inputs, labels = torch.ones(3, 1).double(), torch.zeros(3)
    assert not trainer.requests()
    trainer.step(inputs, labels)
    assert not trainer.requests()
    if group.rank == group.size - 1:
        trainer.request("save")
    if group.rank == 0:
        trainer.request("stop")
    assert not trainer.requests()
    trainer.step(inputs, labels)
    assert set(trainer.requests()) == {"save", "stop"}
    trainer.step(inputs[:0], labels[:0])
    assert not trainer.requests()
    with pytest.raises(UsageError, match="no request 'halt'; there are save, stop"):
        trainer.request("halt")
