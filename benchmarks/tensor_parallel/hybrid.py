"""Steps of fully connected networks in the lab: data parallel, sharded, split, and PyTorch's own, with real products.

unisono lab --hosts 4 --rate 200mbit -- python benchmarks/tensor_parallel/hybrid.py OUT.json 200000000 NETWORK

All contenders train the same weights on the same samples with SGD and momentum, so they have the same loss, which is
written beside the times. In each round every contender is made again, and makes steps in turn. FSDP2, DTensor and
ZeRO-1 (DDP with ZeroRedundancyOptimizer) run on gloo and on the `unisono` backend of torch.distributed.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.rules import BSP, BaseRule, Exchange, Sharded
from unisono.tensor_parallel import data_world
from unisono.tensor_parallel.choose_plan import choose_plan
from unisono.world import World

sys.path.insert(0, str(Path(__file__).parents[1] / "overlaps"))
from steps import gloo

ROUNDS, WARMUP, TIMED = 3, 2, 3
"""Rounds, and steps of each contender in each: not timed, then timed together."""

COMPARED = 4
"""Number of the step, from 0, whose loss is compared."""

RATE, MOMENTUM = 0.01, 0.9
BUCKET = Exchange(bucket_bytes=4 << 20)


class Problem(NamedTuple):
    """Network of fully connected layers, and the samples of a step over all ranks."""

    widths: tuple[int, ...]
    minibatch: int


def cd_dnn(part: int, minibatch: int) -> Problem:
    """CD-DNN of PCL-DNN section 5.4: seven hidden layers of 2,048, here a part of that; inputs are 11 frames of 40."""
    return Problem((440, *[2048 // part] * 7, 9304 // part // 8 * 8), minibatch)


PROBLEMS = {
    "CD-DNN": cd_dnn(2, 64),
    "CD-DNN, large minibatch": cd_dnn(16, 1024),
    "VGG-A's wide layers": Problem((25088 // 4, 1024, 1024, 1000), 64),
}
"""Networks, narrower than the published ones (CD-DNN by 2, VGG-A by 4): four ranks share the memory and cores of one
machine. With the large minibatch CD-DNN is narrower by 16: no layer has more outputs than there are samples."""

Step = Callable[[], torch.Tensor]
"""Function that makes a step and returns this rank's loss."""


class Contender:
    """Something that can make steps; `wait` waits for what a step has left pending."""

    def __init__(self, step: Step, wait: Callable[[], None] = lambda: None) -> None:
        self._step, self.wait = step, wait
        self.losses: list[float] = []

    def step(self) -> None:
        """Make a step."""
        self.losses.append(float(self._step()))


class Data:
    """Samples of all steps: each share of ranks takes its own."""

    def __init__(self, problem: Problem) -> None:
        made = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(problem.minibatch, problem.widths[0], generator=made)
        self.labels = torch.randint(problem.widths[-1], (problem.minibatch,), generator=made)

    def share(self, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one of equal shares."""
        return self.inputs.chunk(ranks)[rank], self.labels.chunk(ranks)[rank]


def network(problem: Problem) -> nn.Sequential:
    """Return the network with the same weights every time."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(problem.widths, problem.widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def names(problem: Problem) -> list[str]:
    """Return the names of the layers with weights."""
    return [str(2 * layer) for layer in range(len(problem.widths) - 1)]


def plan_of(problem: Problem, ranks: int) -> dict[str, str]:
    """Return the plan that pairs layers in model groups: what the first of a pair gives in parts, the other takes."""
    layers = names(problem)
    plan: dict[str, str] = {}
    for first, second in zip(layers[::2], layers[1::2], strict=False):
        plan |= {first: f"column {ranks} gives part", second: f"row {ranks} takes part"}
    if len(layers) % 2:
        plan[layers[-1]] = f"column {ranks}"
    return plan


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, labels: torch.Tensor) -> Step:
    """Return the step of an ordinary loop."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)


def ours(problem: Problem, world: World, rule: BaseRule, plan: dict[str, str] | None = None) -> Contender:
    """Return a Trainer, whose search for the order of exchanges is over."""
    model = network(problem)
    if plan is not None:
        model = unisono.parallel(model, world, rule, plan=plan)
    data = data_world(model, world)
    trainer = unisono.Trainer(model, world, rule, sgd(model), nn.functional.cross_entropy)
    inputs, labels = Data(problem).share(data.rank, data.size)
    contender = Contender(lambda: trainer.step(inputs, labels) / len(inputs), trainer.wait)
    while trainer.reducer.choice.state() is None:
        contender.step()
    return contender


def fsdp2(problem: Problem, group: dist.ProcessGroup, world: World) -> Contender:
    """Return FSDP2, each layer a unit."""
    model, mesh = network(problem), DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender(loop(model, sgd(model), *Data(problem).share(world.rank, world.size)))


def dtensor(problem: Problem, group: dist.ProcessGroup, _: World) -> Contender:
    """Return DTensor's tensor parallelism over all ranks, in the same pairs."""
    model, styles = network(problem), dict[str, Any]()
    layers = names(problem)
    for first, second in zip(layers[::2], layers[1::2], strict=False):
        styles |= {first: ColwiseParallel(), second: RowwiseParallel()}
    if len(layers) % 2:
        styles[layers[-1]] = ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())
    parallelize_module(model, DeviceMesh.from_group(group, "cpu"), styles)
    return Contender(loop(model, sgd(model), *Data(problem).share(0, 1)))


def zero_1(problem: Problem, group: dist.ProcessGroup, world: World) -> Contender:
    """Return DDP with an optimizer whose state is in parts."""
    model = DistributedDataParallel(network(problem), process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=group, lr=RATE, momentum=MOMENTUM
    )
    return Contender(loop(model, optimizer, *Data(problem).share(world.rank, world.size)))


def contenders(problem: Problem, world: World) -> dict[str, Callable[[], Contender]]:
    """Return functions that make each contender."""
    found: dict[str, Callable[[], Contender]] = {
        "data parallel": partial(ours, problem, world, BSP(BUCKET, "chain")),
        "Sharded": partial(ours, problem, world, Sharded(BUCKET, "chain")),
    }
    for ranks in (2, world.size):
        found[f"groups of {ranks}"] = partial(ours, problem, world, BSP(BUCKET, "chain"), plan_of(problem, ranks))
    group, peers = dist.group.WORLD, gloo(world)
    assert group is not None
    for name, make in (("FSDP2", fsdp2), ("DTensor", dtensor), ("ZeRO-1", zero_1)):
        found[f"{name}, gloo"] = partial(make, problem, peers, world)
        found[f"{name}, unisono"] = partial(make, problem, group, world)
    return found


def timed(world: World, contender: Contender) -> tuple[float, float]:
    """Return the seconds of a step, those of the slowest rank, and the mean of all ranks' losses."""
    for _ in range(WARMUP):
        contender.step()
    contender.wait()
    world.barrier()
    began = time.perf_counter()
    for _ in range(TIMED):
        contender.step()
    contender.wait()
    seconds = (time.perf_counter() - began) / TIMED
    return max(world.all_gather_object(seconds)), statistics.mean(world.all_gather_object(contender.losses[COMPARED]))


def computing(problem: Problem, world: World) -> float:
    """Return the seconds in which all ranks, at once, compute a step of data parallelism without any exchange."""
    model = network(problem)
    step = loop(model, sgd(model), *Data(problem).share(world.rank, world.size))
    return timed(world, Contender(step))[0]


def exchange(problem: Problem, world: World) -> float:
    """Return the seconds of an allreduce of all gradients, alone."""
    flat = torch.zeros(sum(one.numel() for one in network(problem).parameters()))
    took = []
    for _ in range(3):
        world.barrier()
        began = time.perf_counter()
        world.allreduce(flat)
        took.append(max(world.all_gather_object(time.perf_counter() - began)))
    return statistics.median(took)


def main(output: str, rate: str, name: str, *chosen: str) -> None:
    """Measure all contenders, or some, on one network."""
    world, path, problem = unisono.init(), Path(output), PROBLEMS[name]
    dist.init_process_group("unisono")
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    makes = {key: make for key, make in contenders(problem, world).items() if not chosen or key in chosen}
    alone, sent = computing(problem, world), exchange(problem, world)
    choice = choose_plan(network(problem), world, Data(problem).share(world.rank, world.size)[0], deferred=True)
    if world.rank == 0:
        print("\n".join(choice.lines), flush=True)
    found: dict[str, Any] = {"network": name, "widths": problem.widths, "minibatch": problem.minibatch}
    found |= {"hosts": world.size, "rate_bits": float(rate), "computing_s": alone, "exchange_alone_s": sent}
    found |= {"chosen": choice.lines, "losses": {}, "seconds": {key: [] for key in makes}}
    for number in range(ROUNDS):
        for key, make in makes.items():
            seconds, loss = timed(world, make())
            found["seconds"][key].append(seconds)
            found["losses"][key] = loss
            gc.collect()
            if world.rank == 0:
                print(f"{name}, round {number + 1}: {key} {seconds:.3f} s a step, loss {loss:.4f}", flush=True)
        found["step_s"] = {key: statistics.median(each) for key, each in found["seconds"].items()}
        if world.rank == 0:  # after each round: a run that is stopped keeps those before
            path.write_text(json.dumps([one for one in rows if one["network"] != name] + [found], indent=1) + "\n")
    if world.rank == 0:
        print(f"{name}: computing {alone:.3f} s, exchange alone {sent:.3f} s ({sent / alone:.1f} times)", flush=True)
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
