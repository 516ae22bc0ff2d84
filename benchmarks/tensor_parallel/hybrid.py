"""Steps of networks whose wide layers are split over groups of ranks, beside data parallelism and PyTorch's own.

unisono lab --hosts 4 --rate 200mbit -- python benchmarks/tensor_parallel/hybrid.py OUT.json 200000000 VGG-A [CONTENDER ...]

Every rank has its own share of the batch, and computes it in each layer that is not split (PCL-DNN 3.2 to 3.4). All
contenders train the same weights on the same samples with SGD and momentum, in one ordinary loop, so they have the same
loss, which is checked. Each is made once, and makes steps in turn with the others. FSDP2 and DTensor run on gloo and on
the `unisono` backend of torch.distributed.

    4 ranks, groups of 2         convolutions          wide layers
    rank 0   samples 0-15        all their weights     half of the weights, samples 0-31     ranks 0 and 2 average theirs
    rank 1   samples 16-31       all their weights     the other half, samples 0-31          ranks 1 and 3 average theirs
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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unisono
from unisono.errors import UnisonoError
from unisono.rules import BSP, BaseRule, Exchange, Sharded
from unisono.tensor_parallel.model import split_of
from unisono.world import World

sys.path.insert(0, str(Path(__file__).parents[1] / "overlaps"))
from steps import gloo

ROUNDS, WARMUP, TIMED = 3, 2, 3
"""Rounds, steps of each contender before the first, not timed, and steps of each in a round, timed together."""

COMPARED = 4
"""Number of the step, from 0, whose loss is compared."""

RATE, MOMENTUM = 0.01, 0.9
BUCKET = Exchange(bucket_bytes=4 << 20)

Layers = list[nn.Module]


class Problem(NamedTuple):
    """Network, as the layers before the wide ones and the widths of those, and the batch of all ranks."""

    features: Callable[[], Layers]
    shape: tuple[int, ...]
    """Shape of a sample."""
    widths: tuple[int, ...]
    batch: int


def vgg_a() -> Layers:
    """Return VGG-A's convolutions, a quarter as wide: 64 x 64 images become 512 features."""
    layers, inputs = Layers(), 3
    for width, depth in ((16, 1), (32, 1), (64, 2), (128, 2), (128, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return layers


def alexnet() -> Layers:
    """Return AlexNet's convolutions, half as wide: 64 x 64 images become 128 features."""
    first = [nn.Conv2d(3, 48, 11, 4, 2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]
    second = [nn.Conv2d(48, 128, 5, padding=2, groups=2), nn.ReLU(), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2)]
    third = [nn.Conv2d(128, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 192, 3, padding=1, groups=2), nn.ReLU()]
    return [*first, *second, *third, nn.Conv2d(192, 128, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(3, 2)]


PROBLEMS = {
    "VGG-A": Problem(vgg_a, (3, 64, 64), (512, 1536, 1536, 1000), 32),
    "AlexNet": Problem(alexnet, (3, 64, 64), (128, 1536, 1536, 1000), 64),
    "CD-DNN": Problem(Layers, (440,), (440, *[1024] * 7, 4648), 64),
}
"""Networks, narrower than the published ones: all ranks share the memory and cores of one machine. CD-DNN (PCL-DNN 5.4)
is half as wide, and has wide layers alone."""


class Contender:
    """Ordinary loop, a step at a time: forward and backward pass, what `average` does to gradients, the update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        share: tuple[torch.Tensor, torch.Tensor],
        average: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self._optimizer, self._share, self._average = model, optimizer, share, average
        self.losses: list[float] = []

    def step(self) -> None:
        """Make a step."""
        inputs, labels = self._share
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        self._average()
        self._optimizer.step()
        self.losses.append(float(loss.detach()))


def share(problem: Problem, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of the batch, and their labels."""
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(problem.batch, *problem.shape, generator=made)
    labels = torch.randint(problem.widths[-1], (problem.batch,), generator=made)
    return inputs.chunk(world.size)[world.rank], labels.chunk(world.size)[world.rank]


def network(problem: Problem) -> nn.Sequential:
    """Return the network, (features, wide layers), with the same weights every time."""
    torch.manual_seed(1)
    features, wide = problem.features(), Layers()
    for inputs, outputs in zip(problem.widths, problem.widths[1:], strict=False):
        wide += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(nn.Sequential(*features, nn.Flatten()), nn.Sequential(*wide[:-1]))


def words(problem: Problem) -> dict[str, str]:
    """Return the splits of the wide layers, without sizes: pairs, of which the last takes in an odd layer behind it."""
    names = [f"1.{2 * number}" for number in range(len(problem.widths) - 1)]
    how = ["column gives part", "row takes part"] * (len(names) // 2)
    if len(names) % 2:
        how[-1:] = ["row takes part gives part", "row takes part"]
    return dict(zip(names, how, strict=True))


STYLES: dict[str, Callable[[], Any]] = {
    "column gives part": lambda: ColwiseParallel(input_layouts=Shard(0)),
    "row takes part": lambda: RowwiseParallel(output_layouts=Shard(0)),
    "row takes part gives part": lambda: RowwiseParallel(output_layouts=Shard(-1)),
}
"""DTensor's styles of the same splits: each rank's own samples are a shard of the batch."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)


def whole(problem: Problem, world: World, rule: BaseRule) -> Contender:
    """Return ours, data parallel in all layers."""
    model = network(problem)
    optimizer = sgd(model)
    return Contender(unisono.parallel(model, world, rule, optimizer), optimizer, share(problem, world))


def hybrid(problem: Problem, world: World, size: int) -> Contender:
    """Return ours, wide layers split over groups of `size`."""
    plan = {name: how.replace(" ", f" {size} ", 1) for name, how in words(problem).items()}
    model = unisono.parallel(network(problem), world, BSP(BUCKET, "chain"), plan=plan)
    return Contender(model, sgd(model), share(problem, world))


def automatic(problem: Problem, world: World) -> Contender:
    """Return ours, split as is predicted to be fastest."""
    data = share(problem, world)
    model = unisono.parallel(network(problem), world, BSP(BUCKET, "chain"), plan="auto", example=data[0])
    return Contender(model, sgd(model), data)


def dtensor(problem: Problem, world: World, size: int, backend: str) -> Contender:
    """Return the hybrid by hand in DTensor: groups of `size`, and means over the mesh's other dimension."""
    model, ranks = network(problem), torch.arange(world.size).view(-1, size)
    across = _group(ranks.t().tolist(), world, backend)
    mesh = DeviceMesh.from_group(_group(ranks.tolist(), world, backend), "cpu")
    everyone = _group([list(range(world.size))], world, backend)
    parallelize_module(model, mesh, {name: STYLES[how]() for name, how in words(problem).items()})

    def average() -> None:
        means: dict[dist.ProcessGroup, list[torch.Tensor]] = {across: [], everyone: []}
        for parameter in model.parameters():
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                local = gradient.redistribute(placements=parameter.placements).to_local()
                means[across].append(local)  # a whole bias is alike in the group already
                parameter.grad = DTensor.from_local(local, mesh, parameter.placements, run_check=False)
            elif gradient is not None:
                means[everyone].append(gradient)
        for group, gradients in means.items():
            if gradients:
                flat = torch.cat([one.flatten() for one in gradients])
                dist.all_reduce(flat, group=group)
                flat /= world.size
                for one, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
                    one.copy_(mean.view_as(one))

    return Contender(model, sgd(model), share(problem, world), average)


def fsdp2(problem: Problem, world: World, backend: str) -> Contender:
    """Return FSDP2, each layer with weights a unit."""
    model = network(problem)
    mesh = DeviceMesh.from_group(_group([list(range(world.size))], world, backend), "cpu")
    for layer in (*model[0], *model[1]):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Contender(model, sgd(model), share(problem, world))


def _group(groups: list[list[int]], world: World, backend: str) -> dist.ProcessGroup:
    """Return this rank's group of a backend."""
    found = [dist.new_group(ranks, backend=backend) for ranks in groups]
    return next(group for group, ranks in zip(found, groups, strict=True) if world.rank in ranks)


def contenders(problem: Problem, world: World) -> dict[str, Callable[[], Contender]]:
    """Return functions that make each contender."""
    sizes = [size for size in (2, 4, 8) if size <= world.size]
    found: dict[str, Callable[[], Contender]] = {
        "data parallel": partial(whole, problem, world, BSP(BUCKET, "chain")),
        "Sharded": partial(whole, problem, world, Sharded(BUCKET, "chain")),
    }
    found |= {f"hybrid, groups of {size}": partial(hybrid, problem, world, size) for size in sizes}
    found["hybrid, auto"] = partial(automatic, problem, world)
    for backend in ("unisono", "gloo"):
        found[f"DTensor, {backend}"] = partial(dtensor, problem, world, sizes[-1], backend)
        found[f"FSDP2, {backend}"] = partial(fsdp2, problem, world, backend)
    return found


def timed(world: World, step: Callable[[], None], times: int) -> float:
    """Return the seconds of one of `times` steps in a row, those of the slowest rank."""
    world.barrier()
    began = time.perf_counter()
    for _ in range(times):
        step()
    return max(world.all_gather_object((time.perf_counter() - began) / times))


def references(problem: Problem, world: World) -> dict[str, float]:
    """Return the seconds in which all ranks, at once, compute a step of data parallelism, and exchange all gradients."""
    model = network(problem)
    alone = Contender(model, sgd(model), share(problem, world))
    gradients = torch.zeros(sum(one.numel() for one in model.parameters()))
    wide = sum(one.numel() for one in model[1].parameters()) / gradients.numel()
    steps = {"computing_s": alone.step, "exchange_alone_s": lambda: world.allreduce(gradients)}
    found = {"gradient_bytes": gradients.nbytes, "in_wide_layers": wide}
    for name, step in steps.items():
        step()
        found[name] = statistics.median(timed(world, step, 1) for _ in range(5))
    return found


def made(makes: dict[str, Callable[[], Contender]], world: World) -> dict[str, Contender]:
    """Return the contenders; the automatic one is left out where its plan cannot be chosen, and the reason is said."""
    found: dict[str, Contender] = {}
    for name, make in makes.items():
        try:
            found[name] = make()
        except UnisonoError as error:
            if world.rank == 0:
                print(f"{name} is not there: {error}", flush=True)
    return found


def measure(found: dict[str, Any], world: World, makes: dict[str, Callable[[], Contender]]) -> None:
    """Add the losses and seconds of all contenders."""
    ready = made(makes, world)
    found["seconds"] = {name: [] for name in ready}
    for number in range(ROUNDS):
        for name, contender in ready.items():
            for _ in range(WARMUP if number == 0 else 0):
                contender.step()
            gc.collect()
            found["seconds"][name].append(timed(world, contender.step, TIMED))
            if world.rank == 0:
                print(f"round {number + 1}: {name} {found['seconds'][name][-1]:.3f} s a step", flush=True)
    found["step_s"] = {name: statistics.median(each) for name, each in found["seconds"].items()}
    first = found["step_s"].get("data parallel", 0.0)
    found["times_data_parallel"] = {name: first / each for name, each in found["step_s"].items()}
    losses = {name: statistics.mean(world.all_gather_object(one.losses[COMPARED])) for name, one in ready.items()}
    found["losses"] = losses
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"losses after {COMPARED + 1} steps differ: {losses}")


def main(output: str, rate: str, name: str, *chosen: str) -> None:
    """Measure all contenders, or some, on one network; what the file has of other networks and ranks stays there."""
    world, path, problem = unisono.init(), Path(output), PROBLEMS[name]
    dist.init_process_group("unisono")
    gloo(world)  # names the interface
    makes = {key: make for key, make in contenders(problem, world).items() if not chosen or key in chosen}
    found: dict[str, Any] = {"network": name, "hosts": world.size, "rate_bits": float(rate), "batch": problem.batch}
    found |= references(problem, world)
    measure(found, world, makes)
    if world.rank == 0:
        print(json.dumps(found, indent=1), flush=True)
        rows = json.loads(path.read_text()) if path.exists() else []
        rows = [one for one in rows if (one["network"], one["hosts"]) != (name, world.size)]
        path.write_text(json.dumps([*rows, found], indent=1) + "\n")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
