"""Times steps whose computing is slept: without overlap, with each overlap, with what is chosen, and PyTorch's DDP.

Started on the ranks by run.py:  steps.py OUTPUT RATE_BITS NETWORK
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bound import bound
from layers import NETWORKS, Layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.bench.collectives import interface_of
from unisono.step.costs import Computing, Cost
from unisono.torch_backend.rendezvous import address_towards
from unisono.world import World

RATIOS = (0.25, 0.5, 1.0, 2.0)
"""What the link needs for the gradients, over the computing."""

TOTAL = 8_000_000
"""Bytes of a network's gradients, after they were made smaller in proportion: so the lab's slow link takes a second."""

DDP_BUCKET = 25 << 20
"""Bytes of PyTorch's buckets; made smaller with the network."""

ROUNDS, BLOCK = 3, 1
"""Each contender makes BLOCK steps, after one that is not timed, by turns with the others, ROUNDS times."""

Step = Callable[[], None]


class Pass:
    """Has a forward or backward pass take as long as it should: what one sleep is too long, the next is shorter.

    On a busy machine each sleep ends late, and 54 layers would be late 108 times in a step. The clock stands still
    while the step waits, so that waiting is never made up for.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._due = clock, 0.0

    def begin(self) -> None:
        """The first layer's computing begins."""
        self._due = self._clock()

    def layer(self, seconds: float) -> None:
        """A layer's computing."""
        self._due += seconds
        time.sleep(max(0.0, self._due - self._clock()))


class Slept(torch.autograd.Function):
    """Takes as long as a layer's computing would, and makes a gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, network: Network, layer: int) -> torch.Tensor:
        """Sleep for a third of the layer's seconds."""
        ctx.shape, ctx.network, ctx.layer = weight.shape, network, layer
        if layer == 0:
            network.passing.begin()
        network.passing.layer(network.seconds[layer] / 3)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Sleep for the other two."""
        if ctx.layer == len(ctx.network.seconds) - 1:
            ctx.network.passing.begin()
        ctx.network.passing.layer(ctx.network.seconds[ctx.layer] * 2 / 3)
        return gradient, torch.ones(ctx.shape), None, None


class Network(nn.Module):
    """Layers of these sizes; a step of all takes `seconds`: a third forward, two thirds backward."""

    def __init__(self, layers: list[Layer], seconds: float) -> None:
        super().__init__()
        smaller = TOTAL / 4 / sum(layer.parameters for layer in layers)
        work = sum(layer.multiplications for layer in layers)
        self.seconds = [seconds * layer.multiplications / work for layer in layers]
        sizes = [max(1, round(layer.parameters * smaller)) for layer in layers]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.value = nn.Parameter(torch.zeros(1))  # so that the first layer has something to pass on
        self.passing = Pass(time.perf_counter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One score for each sample."""
        value = inputs * self.value
        for layer in range(len(self.seconds)):
            value = Slept.apply(value, self.weights[layer], self, layer)
        return value.sum(dim=1)


def no_loss(scores: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The mean: what matters is how long it takes."""
    return scores.mean()


def best_possible(network: Network, seconds: float, cost: Cost) -> float:
    """The bound: no step can be faster on this link."""
    sizes = [weight.numel() * 4 for weight in network.weights]
    needed, ready, now = [], [0.0] * len(sizes), 0.0
    for took in network.seconds:
        needed.append(now)
        now += took / 3
    for layer in reversed(range(len(sizes))):
        now += network.seconds[layer] * 2 / 3
        ready[layer] = now
    return bound(Computing(tuple(needed), tuple(ready), seconds), sizes, cost)


def ours(network: Network, world: World, overlap: str, wire: str | None, bucket: int | None) -> unisono.Trainer:
    """A trainer of a copy of the network."""
    rule = unisono.BSP(unisono.Exchange(wire=wire, bucket_bytes=bucket), overlap)
    trainer = unisono.Trainer(network, world, rule, torch.optim.SGD(network.parameters(), 1e-3), no_loss)
    network.passing = Pass(lambda: time.perf_counter() - trainer.reducer.times.waiting)
    return trainer


def exchange_alone(group: World, wire: str | None) -> float:
    """Seconds in which all gradients are exchanged in one, with nothing beside it."""
    tensor, took = torch.zeros(TOTAL // 4), list[float]()
    for _ in range(4):
        group.barrier()
        start = time.perf_counter()
        group.allreduce(tensor, wire=wire)
        took.append(max(group.all_gather_object(time.perf_counter() - start)))
    return statistics.median(took[1:])


def measure(world: World, peers: dist.ProcessGroup, name: str, ratio: float, beta: float) -> dict[str, Any]:
    """All contenders on one network."""
    layers = NETWORKS[name]
    cost = Cost(0.0, 2 * (world.size - 1) / world.size * beta)
    seconds = cost.seconds(TOTAL) / ratio
    group = world.split(0)
    row: dict[str, Any] = {"network": name, "ratio": ratio, "ranks": world.size, "computing_s": seconds}
    row["link_s"] = cost.seconds(TOTAL)
    for wire, halves in ((None, 1), ("bfloat16", 2)):
        alone = exchange_alone(group, wire)
        name_of = wire or "float32"
        bounds = (Cost(0.0, cost.per_byte / halves), Cost(0.0, alone / TOTAL))
        link, exchange = (best_possible(Network(layers, seconds), seconds, each) for each in bounds)
        row[name_of] = {"exchange_alone_s": alone, "bound_of_link_s": link, "bound_of_exchange_s": exchange}
    trainers: dict[str, unisono.Trainer] = {}
    said: dict[str, list[str]] = {}

    def warm(contender: str, trainer: unisono.Trainer, steps: int) -> None:
        said[contender] = []
        trainer.reducer.programs.log_with(said[contender].append)
        trainers[contender] = trainer
        run(trainer, steps)

    for contender, wire in (("auto", None), ("auto, bfloat16", "bfloat16")):
        trainer = ours(Network(layers, seconds), group, "auto", wire, None)
        steps = search(trainer)
        warm(contender, trainer, 1)
        chosen = trainer.reducer.programs.tuning.chosen
        assert chosen is not None, "the search has ended"
        row[contender] = {"warm_up_steps": steps, "setting": list(trainer.reducer.programs.tuning.setting[:2])}
        row[contender]["predicted_s"] = chosen.prediction.step
    bucket = trainers["auto"].reducer.programs.tuning.setting.bucket_bytes
    for contender in ("none", "funnel", "concurrent", "chain"):
        trainer = ours(Network(layers, seconds), group, contender, None, bucket)
        if (
            trainers["auto"].reducer.programs.tuning.setting.overlap == contender
        ):  # what was found need not be found again
            trainer.reducer.restore(trainers["auto"].reducer.programs.tuning.state())
        warm(contender, trainer, 2)
    steps_of = {contender: trainer_step(trainer) for contender, trainer in trainers.items()}
    smaller = TOTAL / 4 / sum(layer.parameters for layer in layers)
    peer = ddp_step(Network(layers, seconds), peers, DDP_BUCKET * smaller)
    for _ in range(3):
        peer()
    steps_of["DDP on gloo"] = peer
    took: dict[str, list[float]] = {contender: [] for contender in steps_of}
    for _ in range(ROUNDS):
        for contender, step in steps_of.items():
            world.barrier()
            step()  # from here on each step finds what the last one has left to it
            start = time.perf_counter()
            for _ in range(BLOCK):
                step()
            took[contender].append(max(world.all_gather_object(time.perf_counter() - start)) / BLOCK)
            if contender in trainers:
                trainers[contender].wait()
    row["seconds"] = took
    row["step_s"] = {contender: statistics.median(each) for contender, each in took.items()}
    group.free()
    return row


def run(trainer: unisono.Trainer, steps: int) -> None:
    """Make some steps, to the end."""
    step = trainer_step(trainer)
    for _ in range(steps):
        step()
    trainer.wait()


def search(trainer: unisono.Trainer) -> int:
    """Make steps, one after another as a program does, until the search for a setting is over; return their number."""
    step, steps = trainer_step(trainer), 0
    while trainer.reducer.programs.tuning.state() is None:
        step()
        steps += 1
    trainer.wait()
    return steps


def trainer_step(trainer: unisono.Trainer) -> Step:
    """A step of ours."""
    inputs, labels = torch.ones(1, 1), torch.zeros(1)

    def step() -> None:
        trainer.step(inputs, labels)

    return step


def gloo(world: World) -> dist.ProcessGroup:
    """gloo's group of the same ranks, over the interface that leads to the other nodes."""
    hosts = world.all_gather_object(socket.gethostname())
    others = [host for host in hosts if host != hosts[world.rank]]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(address_towards(others[0] if others else "127.0.0.1")))
    return dist.new_group(backend="gloo")


def ddp_step(network: Network, peers: dist.ProcessGroup, bucket: float) -> Step:
    """A step of PyTorch's DDP on gloo, with buckets of so many bytes."""
    options = {"bucket_cap_mb": bucket / (1 << 20), "gradient_as_bucket_view": True}
    model = DistributedDataParallel(network, process_group=peers, **options)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()

    return step


def line(row: dict[str, Any]) -> str:
    """A measurement in a line."""
    step = row["step_s"]
    each = "  ".join(f"{contender} {seconds:.2f}" for contender, seconds in step.items())
    bounds = f"{row['float32']['bound_of_link_s']:.2f} {row['float32']['bound_of_exchange_s']:.2f}"
    return f"{row['network']} x{row['ratio']}: bounds {bounds}  {each}  {row['auto']['setting']}"


def main(output: str, rate: str, name: str) -> None:
    """All ratios of a network; what the file has of other networks stays there."""
    world = unisono.init()
    path = Path(output)
    dist.init_process_group("unisono")
    group = gloo(world)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [row for row in rows if row["network"] != name]
    for ratio in RATIOS:
        rows.append(measure(world, group, name, ratio, 8 / float(rate)))
        if world.rank == 0:
            print(line(rows[-1]), flush=True)
            path.write_text(json.dumps({"rate_bits": float(rate), "total_bytes": TOTAL, "rows": rows}, indent=1) + "\n")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
