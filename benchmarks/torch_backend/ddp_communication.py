"""Times the communication of unmodified DistributedDataParallel on one node: exposed in a step, and by itself.

Started on the ranks by run.py:  ddp_communication.py OUTPUT ROUNDS

    exposed    a step's time less that of the same step without an exchange, which follows it in the same round
    in all     the exchange of the same buckets while nothing is computed
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

import numpy as np
import torch
import torch.distributed as dist
from operations import gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.models.resnet_cifar import BasicBlock
from unisono.mpi import MPI
from unisono.reducer import reducer_of
from unisono.world import World

ALONE, OURS = "without exchange", "unisono"

Call = Callable[[], object]


class Contender(NamedTuple):
    """Calls of a contender."""

    step: Call
    exchange: Call
    """Exchange of a step's gradients by itself."""
    prepare: Call = lambda: None
    """What is done before that, and not timed."""


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


def contenders(world: World, comm: MPI.Intracomm, peers: Any, make: Callable[[], Any]) -> dict[str, Contender]:
    """Contenders by name, for one model."""
    torch.manual_seed(0)
    network, inputs, targets = make()

    def step(model: nn.Module) -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()

    def by(group: Any, shared: bool, hook: Hook | None = None) -> Contender:
        os.environ["DDP_DISABLE_COMM_MEM"] = str(int(not shared))
        model, other = (DistributedDataParallel(copy.deepcopy(network), process_group=group) for _ in range(2))
        del os.environ["DDP_DISABLE_COMM_MEM"]
        buckets = kept_buckets(other, step)
        if hook is not None:
            model.register_comm_hook(None, hook)

        def exchange(_: Any = other) -> None:  # which owns the buckets
            works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
            for work in works:
                work.wait()

        def exchange_by_mpi(_: Any = other) -> None:
            for bucket in buckets:
                comm.Allreduce(MPI.IN_PLACE, bucket.numpy())

        return Contender(lambda: step(model), exchange if hook is None else exchange_by_mpi)

    def accumulate() -> None:
        with unisono.no_sync(averaged):
            step(averaged)

    averaged = unisono.parallel(copy.deepcopy(network), world)
    reducer: Any = reducer_of(averaged)
    while reducer.choice.state() is None:
        step(averaged)
    return {
        OURS: by(dist.group.WORLD, True),
        "unisono, ordinary memory": by(dist.group.WORLD, False),
        "gloo": by(peers, True),
        "MPI_Allreduce in a hook": by(peers, True, mpi_hook(comm)),
        "unisono.parallel": Contender(lambda: step(averaged), lambda: unisono.synchronize(averaged), accumulate),
        ALONE: Contender(lambda: step(network), lambda: None),
    }


def timed(world: World, call: Call) -> float:
    """Seconds of a call that all ranks begin together, on the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    call()
    return max(world.all_gather_object(time.perf_counter() - start))


def main(output: str, rounds: str) -> None:
    """All models; the contenders take turns, in rotating order, each step beside one without exchange."""
    world = unisono.init()
    dist.init_process_group("unisono")
    peers, comm = gloo(world), world.comm.Dup()
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        each = contenders(world, comm, peers, make)
        names = list(each)
        times: dict[str, dict[str, list[float]]] = {one: {"step": [], "exposed": [], "in all": []} for one in names}
        for number in range(-3, int(rounds)):  # the first three are to get ready
            for one in np.roll(names, number).tolist():
                seconds = timed(world, each[one].step)
                exposed = seconds - timed(world, each[ALONE].step)
                each[one].prepare()
                whole = timed(world, each[one].exchange)
                for kind, value in zip(times[one], (seconds, exposed, whole), strict=True):
                    times[one][kind] += [value] * (number >= 0)
            if world.rank == 0:
                print(f"{name}: round {number}", flush=True)
        nbytes = sum(parameter.nbytes for parameter in make()[0].parameters())
        found[name] = {"gradient_bytes": nbytes, "seconds": times}
    if world.rank == 0:
        result = {"ranks": world.size, "nodes": world.nodes, "models": found}
        Path(output).write_text(json.dumps(result, indent=1) + "\n")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
