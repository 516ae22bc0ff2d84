"""Whatever goes on beside what, the weights have the same bits: on two ranks any order of a sum would have. Only phases
sum in another order on more."""

from __future__ import annotations

import torch
from tests.mpi.reducer.shares import SMALL, batches
from torch import nn

import unisono
from unisono.step.overlaps import OVERLAPS
from unisono.world import World


def trained(world: World, steps: int, rule: unisono.BSP) -> bytes:
    """The weights after some steps of a Trainer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    trainer = unisono.Trainer(model, world, rule, optimizer)
    for inputs, labels in batches(world, steps):
        trainer.step(inputs, labels)
    trainer.wait()
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def test_all_overlaps_end_with_the_same_bits(spread: World) -> None:
    bits = {name: trained(spread, 6, unisono.BSP(SMALL, name)) for name in OVERLAPS if name != "phases"}
    assert len(set(bits.values())) == 1
    assert len(set(spread.all_gather_object(bits["chain"]))) == 1


def test_on_one_node_the_choice_of_buckets_does_not_change_a_bit(group: World) -> None:
    bits = trained(group, 40, unisono.BSP())  # tries several overlaps and sizes
    assert bits == trained(group, 40, unisono.BSP(SMALL, "none"))
