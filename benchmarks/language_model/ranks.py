"""Trains gpt_small on a pack: loss beside a plain PyTorch loop, and tokens/s beside DistributedDataParallel on gloo.

Started on the ranks by run.py:  ranks.py PACK OUTPUT
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.data import Loader
from unisono.models import make_network
from unisono.training.accuracy import classification_loss
from unisono.world import World

BATCH = 32
"""Windows of a step, over all ranks together."""

STEPS, ROUNDS, STEPS_OF_ROUND = 60, 24, 5
"""Steps whose loss is compared; rounds that are timed; steps of each contender in a round."""

Step = Callable[[Tensor, Tensor], float]
"""Step on this rank's inputs and labels. Returns the sum of the loss over its windows."""


class Contender(NamedTuple):
    """Loop that is timed."""

    step: Step
    wait: Callable[[], None] = lambda: None
    """Function that waits until the last step's updates are over."""


class Round(NamedTuple):
    """Round of one contender, in seconds of a step."""

    wall: float
    """Seconds from the barrier before the round to that after it, mean over ranks."""
    processor: float
    """Seconds of all threads of a rank, mean over ranks."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all have."""
    return torch.optim.AdamW(model.parameters(), 1e-3)


def plain(model: nn.Module, parallel: nn.Module) -> Step:
    """Return a step as PyTorch's tutorials write it."""
    optimizer = optimizer_of(model)

    def step(inputs: Tensor, labels: Tensor) -> float:
        optimizer.zero_grad()
        loss = classification_loss(parallel(inputs), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach()) * len(labels)

    return step


def losses(loader: Loader, step: Step, world: World) -> list[float]:
    """Return the mean loss of each step, over all ranks."""
    sums = torch.tensor([step(inputs, labels) for inputs, labels in islice(loader, STEPS)], dtype=torch.float64)
    return (world.allreduce(sums) / BATCH).tolist()


def compare_losses(pack: str, model: nn.Module, world: World) -> dict[str, object]:
    """Return the losses of unisono on all ranks and of a plain loop on one rank, in float64 on the same order."""
    alone = world.split(world.rank)
    curves: dict[str, list[float]] = {}
    for name, ranks in (("unisono", world), ("plain", alone)):
        duplicate = copy.deepcopy(model).double()
        step = (
            plain(duplicate, duplicate)
            if name == "plain"
            else unisono.Trainer(duplicate, world, unisono.BSP(), optimizer_of(duplicate)).step
        )
        with Loader(pack, ranks, BATCH) as loader:
            curves[name] = losses(loader, step, ranks)
    apart = max(abs(ours / bare - 1) for ours, bare in zip(curves["unisono"], curves["plain"], strict=True))
    alone.free()
    return {"steps": STEPS, "largest relative difference": apart, **curves}


def batches_of(loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches without end."""
    while True:
        yield from loader


def compare_speed(pack: str, model: nn.Module, world: World) -> dict[str, object]:
    """Return the rounds of all contenders, which take turns, after as many rounds as the Trainer's search takes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    gloo = dist.new_group(backend="gloo")
    copies = [copy.deepcopy(model) for _ in range(3)]
    trainer = unisono.Trainer(copies[0], world, unisono.BSP(), optimizer_of(copies[0]))
    contenders = {
        "unisono.Trainer": Contender(trainer.step, trainer.wait),
        "DDP on gloo": Contender(plain(copies[1], DistributedDataParallel(copies[1], process_group=gloo))),
        "without exchange": Contender(plain(copies[2], copies[2])),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in contenders}
    with Loader(pack, world, BATCH) as loader:
        source, names, warmup = batches_of(loader), list(contenders), 0
        while warmup < 2 or trainer.reducer.programs.tuning.state() is None:
            for contender in contenders.values():
                time_round(contender, source, world)
            warmup += 1
        for index in range(ROUNDS):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                rounds[name].append(time_round(contenders[name], source, world))
        window = loader.channels
    setting = trainer.reducer.programs.tuning.setting
    return {
        "tokens of a step": BATCH * window,
        "steps before": warmup * STEPS_OF_ROUND,
        "setting": {"overlap": setting.overlap, "bucket_bytes": setting.bucket_bytes},
        "rounds": {name: [times._asdict() for times in each] for name, each in rounds.items()},
    }


def time_round(contender: Contender, source: Iterator[tuple[Tensor, Tensor]], world: World) -> Round:
    """Return the times of a round of a contender, on batches that are there before it begins."""
    given = [(inputs.clone(), labels.clone()) for inputs, labels in islice(source, STEPS_OF_ROUND)]
    world.barrier()
    began, processor = time.perf_counter(), time.process_time()
    for inputs, labels in given:
        contender.step(inputs, labels)
    contender.wait()
    world.barrier()
    wall, processor = time.perf_counter() - began, time.process_time() - processor
    mean = world.allreduce(torch.tensor([wall, processor], dtype=torch.float64)) / (world.size * STEPS_OF_ROUND)
    return Round(*mean.tolist())


def main(pack: str, output: str) -> None:
    """Measure and write."""
    world = unisono.init()
    dist.init_process_group("unisono")
    with Loader(pack, world, BATCH) as loader:
        torch.manual_seed(0)
        model = make_network("gpt_small", "", loader.classes, loader.channels)
    results = {
        "ranks": world.size,
        "loss": compare_losses(pack, model, world),
        "speed": compare_speed(pack, model, world),
    }
    if world.rank == 0:
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
