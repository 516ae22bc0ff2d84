"""A Trainer whose model is on a device, one for each rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unisono
from unisono.errors import TensorError
from unisono.world import World

STEPS, EACH = 6, 4


@pytest.fixture
def place(device: torch.device, world: World) -> torch.device:
    """This rank's device."""
    return torch.device(device.type, world.rank % torch.accelerator.device_count())


def trained(world: World, where: torch.device, moved: bool) -> tuple[list[torch.Tensor], list[float], float]:
    """The weights after some steps, the losses, and the loss of a test; batches are moved by the Trainer or before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 6)).double().to(where)
    trainer = unisono.Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(world.rank)
    batches = [
        (torch.randn(EACH, 5, dtype=torch.float64, generator=generator), torch.arange(EACH)) for _ in range(STEPS)
    ]
    if moved:
        batches = [(inputs.to(where), labels.to(where)) for inputs, labels in batches]
    losses = [trainer.step(*batch) for batch in batches]
    assert isinstance(losses[0], float if where.type == "cpu" else torch.Tensor)
    tested = trainer.evaluate(batches, world.size * STEPS * EACH)
    return (
        [tensor.detach().cpu() for tensor in model.state_dict().values()],
        [float(loss) for loss in losses],
        tested.loss,
    )


@pytest.mark.parametrize("moved", [False, True])
def test_it_trains_as_on_the_host(world: World, place: torch.device, moved: bool) -> None:
    weights, losses, tested = trained(world, torch.device("cpu"), moved)
    own_weights, own_losses, own_tested = trained(world, place, moved)
    torch.testing.assert_close(own_weights, weights, rtol=1e-12, atol=1e-12)
    assert own_losses == pytest.approx(losses, rel=1e-12)
    assert own_tested == pytest.approx(tested, rel=1e-12)


def test_all_ranks_learn_of_a_model_on_two_devices(world: World, place: torch.device) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6)).to(place)
    if world.rank == world.size - 1:
        model[1].cpu()
    with pytest.raises(TensorError, match=rf"rank {world.size - 1}: the model: tensors on {place.type}:\d+ and on cpu"):
        unisono.Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1))


def test_a_batch_on_another_device_is_an_error(world: World, place: torch.device) -> None:
    model = nn.Linear(5, 6)
    trainer = unisono.Trainer(model, world, unisono.BSP(), torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TensorError, match=f"the batch is on {place}, and the model on cpu: move one to the other"):
        trainer.step(torch.ones(EACH, 5, device=place), torch.arange(EACH, device=place))
