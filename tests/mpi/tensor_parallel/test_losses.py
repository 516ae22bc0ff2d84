"""Split networks have the losses of whole ones: for each layer, plan, group size, and hybrids of both kinds."""

from __future__ import annotations

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, Case, alone, model_of, normal, train, with_sizes
from torch import nn

import unisono
from unisono.tensor_parallel.whole_state import whole_state_dict
from unisono.world import World

STEPS = 50


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name, case in CASES.items() for plan in case.plans])
def test_split_networks_have_the_losses_of_whole_ones(group: World, name: str, plan: str) -> None:
    case = CASES[name]
    expected, trained = alone(case, group, STEPS)
    assert sum(expected[-4:]) < sum(expected[:4]), "a network that learns nothing is like any other"
    for size in (size for size in (1, 2, 3, 4) if group.size % size == 0):
        model = unisono.parallel(model_of(case), group, plan=with_sizes(case.plans[plan], size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        losses = train(model, optimizer, case, group, range(STEPS))
        assert losses == pytest.approx(expected, rel=1e-9), size
        whole = whole_state_dict(model)
        for key, value in whole.items():
            torch.testing.assert_close(value, trained.state_dict()[key], rtol=1e-8, atol=1e-9)


def test_groups_across_nodes(spread: World) -> None:
    """Activations go by messages where ranks of a group are on different nodes."""
    case, steps = CASES["mlp"], 12
    expected, _ = alone(case, spread, steps)
    for size in (size for size in (1, 2, 3, 4) if spread.size % size == 0):
        model = unisono.parallel(model_of(case), spread, plan=with_sizes(case.plans["chain"], size))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
        assert train(model, optimizer, case, spread, range(steps)) == pytest.approx(expected, rel=1e-9), size


def test_batch_norm_beside_split_layers(group: World) -> None:
    """One group of all ranks has whole batches, so its norms have the statistics of one rank."""
    case = Case(
        lambda: nn.Sequential(nn.Conv2d(2, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)),
        {},
        normal(2, 4, 4),
    )
    expected, trained = alone(case, group, 12)
    model = unisono.parallel(model_of(case), group, plan={"0": "column", "4": "row"})
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    assert train(model, optimizer, case, group, range(12)) == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(model[1].running_mean, trained[1].running_mean, rtol=1e-9, atol=1e-12)
