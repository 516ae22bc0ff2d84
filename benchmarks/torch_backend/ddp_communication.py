"""Times the steps of one contender on one node, and the exchange of their gradients by itself.

Started on the ranks by run.py:  ddp_communication.py OUTPUT MODEL CONTENDER STEPS

Each contender has processes of its own: in one process, the gradients that the others keep would decide whether the
memory of new gradients comes from the allocator or, page by page, from the kernel.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from operations import gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.engine.communicator_pool import CommunicatorPool
from unisono.models.resnet import BasicBlock
from unisono.mpi import MPI
from unisono.reducer import reducer_of
from unisono.world import World

OURS, ORDINARY, GLOO, HOOK, PARALLEL, ALONE = CONTENDERS = (
    "unisono",
    "unisono, ordinary memory",
    "gloo",
    "MPI_Allreduce in a hook",
    "unisono.parallel",
    "without exchange",
)

WARMUP_STEPS = 4

Call = Callable[[], object]


class Contender(NamedTuple):
    """Calls of a contender."""

    step: Call
    exchange: Call
    """Exchange of the buckets of a step by itself."""


Hook = Callable[[None, Any], torch.futures.Future[torch.Tensor]]


def resnet18() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A ResNet of 18 layers for images of 64 x 64 (45 MB of gradients), images and labels."""
    widths = 64, 64, 128, 128, 256, 256, 512, 512
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
    blocks = [BasicBlock(before, width) for before, width in zip((64, *widths), widths, strict=False)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return model, torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A transformer of 7 layers, 512 wide, with 8,000 tokens (121 MB of gradients), texts and their next tokens."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 7, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(8000, 512), blocks, nn.Linear(512, 8000, bias=False), nn.Flatten(0, 1))
    return model, torch.randint(8000, (4, 32)), torch.randint(8000, (4 * 32,))


MODELS = {"resnet18": resnet18, "transformer": transformer}


def mpi_hook(comm: MPI.Intracomm) -> Hook:
    """A hook that averages a bucket by MPI_Allreduce, in place, in the thread of the backward pass."""

    def hook(_: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().div_(comm.size)
        comm.Allreduce(MPI.IN_PLACE, buffer.numpy())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    hook.__annotations__.clear()  # PyTorch would compare them
    return hook


def kept_buckets(model: DistributedDataParallel, step: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    """The buckets of `model` once they are in their final order; `model` is to be kept as long as they are used."""
    kept: list[torch.Tensor] = []

    def hook(_: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        kept.append(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__.clear()
    model.register_comm_hook(None, hook)
    for _ in range(3):
        kept.clear()
        step(model)
    return kept


def by_ddp(name: str, network: nn.Module, step: Callable[[nn.Module], None], world: World) -> Contender:
    """Return DistributedDataParallel with the backend, the memory of buckets and the hook that `name` stands for."""
    dist.init_process_group("unisono")
    comm = world.comm.Dup()
    group = dist.group.WORLD if name in (OURS, ORDINARY) else gloo(world)
    os.environ["DDP_DISABLE_COMM_MEM"] = str(int(name == ORDINARY))
    model, twin = (DistributedDataParallel(module, process_group=group) for module in (network, copy.deepcopy(network)))
    buckets = kept_buckets(twin, step)
    twin.zero_grad()
    if name == HOOK:
        model.register_comm_hook(None, mpi_hook(comm))

    def exchange(_: Any = twin) -> None:  # which owns the buckets
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    def exchange_by_mpi(_: Any = twin) -> None:
        for bucket in buckets:
            comm.Allreduce(MPI.IN_PLACE, bucket.numpy())

    return Contender(lambda: step(model), exchange_by_mpi if name == HOOK else exchange)


def by_parallel(network: nn.Module, step: Callable[[nn.Module], None], world: World) -> Contender:
    """Return `unisono.parallel`, once it has chosen its buckets."""
    model = unisono.parallel(network, world)
    reducer: Any = reducer_of(model)
    while reducer.programs.tuning.state() is None:
        step(model)
    memory, exchanging = reducer.memory, world.resource(CommunicatorPool).worlds(1)[0]

    def exchange() -> None:
        for key in memory.keys:
            exchanging.allreduce(memory.bucket(key))

    return Contender(lambda: step(model), exchange)


def make_contender(name: str, make: Callable[[], Any], world: World) -> Contender:
    """Return the contender of that name for a model."""
    torch.manual_seed(0)
    network, inputs, targets = make()

    def step(model: nn.Module) -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()

    if name == ALONE:
        return Contender(lambda: step(network), lambda: None)
    return by_parallel(network, step, world) if name == PARALLEL else by_ddp(name, network, step, world)


def timed(world: World, call: Call) -> float:
    """Seconds of a call that all ranks begin together, on the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    call()
    return max(world.all_gather_object(time.perf_counter() - start))


def main(output: str, model: str, name: str, steps: str) -> None:
    """Time the steps and the exchanges of a contender; write the seconds, and the bytes of the gradients."""
    world, make = unisono.init(), MODELS[model]
    contender = make_contender(name, make, world)
    times: dict[str, list[float]] = {"step": [], "in all": []}
    for kind, call in (("step", contender.step), ("in all", contender.exchange)):
        for _ in range(WARMUP_STEPS):
            call()
        times[kind] = [timed(world, call) for _ in range(int(steps))]
    if world.rank == 0:
        nbytes = sum(parameter.nbytes for parameter in make()[0].parameters())
        Path(output).write_text(json.dumps({"gradient_bytes": nbytes, "seconds": times}))
    world.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
