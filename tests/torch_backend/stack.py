"""What PyTorch builds on its collectives, on 4 ranks over unisono; every rank asserts that the results are right.

mpiexec -n 4 python tests/torch_backend/stack.py FOLDER        checkpoints are written into FOLDER

Prints the name of each part when it is done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import unisono  # noqa: F401 - registers the backend

RATE = 0.1


def network() -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def batches(owner: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets that differ between owners."""
    source = torch.Generator().manual_seed(owner)
    return [
        (
            torch.randn(8, 6, generator=source, dtype=torch.float64),
            torch.randn(8, 4, generator=source, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def serial(steps: list[list[tuple[torch.Tensor, torch.Tensor]]], divisor: int) -> nn.Sequential:
    """The network after training in one process: each step sums the gradients of its batches, divided by `divisor`."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in steps:
        optimizer.zero_grad()
        for inputs, targets in step:
            (mse_loss(model(inputs), targets) / divisor).backward()
        optimizer.step()
    return model


def whole(model: nn.Module) -> list[torch.Tensor]:
    """All weights, put together where they are cut."""
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.state_dict().values()]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """One step of training; the loss before it."""
    optimizer.zero_grad()
    loss = mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.item()


def join(_: Path) -> None:
    """Rank r has r + 2 batches: training goes on until the last has none, and who has none adds nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with Join([model]):
        for batch in batches(rank, rank + 2):
            step(model, optimizer, batch)
    everyone = [batches(owner, owner + 2) for owner in range(size)]
    steps = [[own[index] for own in everyone if index < len(own)] for index in range(size + 1)]
    torch.testing.assert_close(whole(model.module), whole(serial(steps, size)))


def mesh_of_two_dimensions(_: Path) -> None:
    """Tensor parallelism within pairs of ranks, FSDP2 between them, is what one process does with all batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for batch in batches(mesh["data"].get_local_rank(), 5):
        step(model, optimizer, batch)
    both = [batches(owner, 5) for owner in range(2)]
    torch.testing.assert_close(whole(model), whole(serial([list(pair) for pair in zip(*both, strict=True)], 2)))


def distributed_checkpoint(folder: Path) -> None:
    """What 4 shards saved, a mesh of 2 x 2 loads, and goes on as if nothing had been."""
    first, second, third = batches(0, 3)
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, first)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"weights": weights, "optimizer": state}, checkpoint_id=folder)

    other = network()
    fully_shard(other, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    other_optimizer = torch.optim.Adam(other.parameters())
    weights, state = get_state_dict(other, other_optimizer)
    checkpoint.load({"weights": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)

    torch.testing.assert_close(whole(other), whole(model), rtol=0, atol=0)
    for batch in (second, third):
        assert abs(step(other, other_optimizer, batch) - step(model, optimizer, batch)) < 1e-12
    torch.testing.assert_close(whole(other), whole(model))


def objects(_: Path) -> None:
    """Objects of any kind and size, in every way that there is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = [{"rank": member, "text": "x" * 1000 * member} for member in range(size)]

    gathered = [None] * size
    dist.all_gather_object(gathered, everyone[rank])
    assert gathered == everyone

    at_root = [None] * size if rank == 1 else None
    dist.gather_object(everyone[rank], at_root, dst=1)
    assert at_root == (everyone if rank == 1 else None)

    copies = ["a", {2: "b"}, everyone] if rank == 2 else [None] * 3
    dist.broadcast_object_list(copies, src=2)
    assert copies == ["a", {2: "b"}, everyone]

    received = [None]
    dist.scatter_object_list(received, everyone if rank == 3 else None, src=3)
    assert received == [everyone[rank]]

    if rank == 0:
        dist.send_object_list([everyone, "end"], dst=3)
    if rank == 3:
        letter = [None, None]
        dist.recv_object_list(letter, src=0)
        assert letter == [everyone, "end"]


PARTS: tuple[Callable[[Path], None], ...] = (join, mesh_of_two_dimensions, distributed_checkpoint, objects)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    assert dist.get_world_size() == 4, f"started with {dist.get_world_size()} ranks, not 4"
    for part in PARTS:
        part(Path(sys.argv[1]))
        if dist.get_rank() == 0:
            print(part.__name__, flush=True)
    dist.destroy_process_group()
