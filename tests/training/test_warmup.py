"""A step before the first."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from unisono.compute import convolution_plan
from unisono.compute.algorithms import DEFAULT
from unisono.compute.convolution_plan import ConvolutionPlan
from unisono.compute.prepare import prepare
from unisono.training.warmup import warm_up


class Others:
    """A world with a second rank, that has measured this."""

    def __init__(self, measured: dict[str, dict[str, float]]) -> None:
        self._measured = measured

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self._measured]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))


def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    model, plan = network(), ConvolutionPlan()
    prepare(model, plan)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    world: Any = Others({})
    labels = torch.zeros(2, dtype=torch.int64)
    warm_up(model, lambda inputs: cross_entropy(model(inputs), labels), torch.zeros(2, 3, 6, 6), plan, world)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert plan.frozen
    assert len(plan.measured) == 2  # forward and the weight's gradient: nobody asks for that of the inputs


def test_all_ranks_choose_the_same_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_plan, "MIN_AUTOTUNED_OPERATIONS", 0)
    model, plan = network(), ConvolutionPlan()
    prepare(model, plan)
    others = {"a": {DEFAULT: 1.0}}
    world: Any = Others(others)
    warm_up(model, lambda inputs: model(inputs).sum(), torch.zeros(0, 3, 6, 6), plan, world)
    assert plan.measured == others
