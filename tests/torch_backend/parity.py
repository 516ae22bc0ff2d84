"""Trains the same network in the ways that PyTorch has, over gloo and over unisono, and compares the losses.

mpiexec -n 4 python tests/torch_backend/parity.py                      all ways
mpiexec -n 4 python tests/torch_backend/parity.py ddp float64          those of these names

Prints for each way and dtype the largest difference between losses, over all steps and ranks, and the first and the
last loss of rank 0. The network is smooth: at the kink of a ReLU rounding alone would make two trainings differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unisono

STEPS, BATCH, WIDTH, CLASSES = 30, 16, 64, 10
DTYPES = {"float64": torch.float64, "float32": torch.float32}


class Setup(NamedTuple):
    """What is trained, ready for the first step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_parallel: bool = True
    """Whether each rank has batches of its own."""


def network() -> nn.Sequential:
    """Two hidden layers, large enough for PowerSGD to compress their gradients."""
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )


def ddp(model: nn.Sequential) -> Setup:
    """DistributedDataParallel; small buckets, so that there are several."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.1)
    return Setup(parallel, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def fsdp2(model: nn.Sequential) -> Setup:
    """Each layer sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Setup(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def tensor_parallel(model: nn.Sequential) -> Setup:
    """The first matrix cut by columns, the second by rows; all ranks see the same batches."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    return Setup(model, optimizer, data_parallel=False)


def zero1(model: nn.Sequential) -> Setup:
    """The optimizer's state cut over the ranks."""
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3)
    return Setup(parallel, optimizer)


def powersgd(model: nn.Sequential) -> Setup:
    """Gradients compressed to matrices of rank 1 after five steps, with error feedback and warm start.

    At higher ranks orthogonalization makes so much of rounding that gloo, too, differs from itself by 1e-3 in float32
    when the first weights do by one unit in the last place.
    """
    parallel = DistributedDataParallel(model)
    state = PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=5)
    parallel.register_comm_hook(state, powerSGD_hook)
    return Setup(parallel, torch.optim.SGD(model.parameters(), lr=0.3))


VARIANTS: dict[str, Callable[[nn.Sequential], Setup]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tensor_parallel": tensor_parallel,
    "zero1": zero1,
    "powersgd": powersgd,
}


def losses(way: str, dtype: str) -> torch.Tensor:
    """The loss of each step on this rank."""
    torch.manual_seed(0)
    model, optimizer, data_parallel = VARIANTS[way](network().to(DTYPES[dtype]))
    own = torch.Generator().manual_seed(dist.get_rank() if data_parallel else 0)
    teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(0), dtype=DTYPES[dtype])
    values = []
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=own, dtype=DTYPES[dtype])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(dim=1))
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return torch.tensor(values, dtype=torch.float64)


def main(cases: list[tuple[str, str]]) -> None:
    """Train every case, a way and a dtype, over gloo, then over unisono; rank 0 prints a line for each."""
    world = unisono.init()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    by_gloo = []
    for way, dtype in cases:
        by_gloo.append(losses(way, dtype))
        if world.rank == 0:
            print(f"{way} {dtype}: over gloo", flush=True)
    kept = dist.group.WORLD  # gloo ends badly when the last reference to it goes in a callback of PowerSGD
    dist.destroy_process_group()
    dist.init_process_group("unisono")
    for (way, dtype), expected in zip(cases, by_gloo, strict=True):
        values = losses(way, dtype)
        difference: Any = max(world.comm.allgather((values - expected).abs().max().item()))
        if world.rank == 0:
            first, last = values[0].item(), values[-1].item()
            print(f"{way} {dtype}: difference {difference:.1e}, loss {first:.4f} to {last:.4f}", flush=True)
    dist.destroy_process_group()
    del kept


if __name__ == "__main__":
    named = [case for case in product(VARIANTS, DTYPES) if set(case) & set(sys.argv[1:])]
    main(named or list(product(VARIANTS, DTYPES)))
