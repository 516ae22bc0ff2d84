"""Split networks have the losses of whole ones: for each layer, plan, group size, and hybrids of both kinds."""

from __future__ import annotations

import pytest
import torch
from tests.mpi.tensor_parallel.networks import CASES, alone, model_of, train, with_sizes

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
