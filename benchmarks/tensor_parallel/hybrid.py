"""Steps of networks whose wide layers are split over groups of ranks, beside data parallelism and PyTorch's own.

unisono lab --hosts 4 --rate 200mbit -- python benchmarks/tensor_parallel/hybrid.py OUT.json 200000000 VGG-A

Names of contenders may follow; without any, all are measured. All train the same weights on the same samples with SGD
and momentum, in one ordinary loop, so they have the same loss, which is checked. Each makes steps in turn with the
others. Every rank has its own share of the batch, and computes it in all layers that are whole (PCL-DNN 3.2 to 3.4):

    4 ranks, groups of 2     convolutions         wide layers                        gradients averaged over
    rank 0                   samples 0 to 7       samples 0 to 15, half of weights   all ranks; ranks 0 and 2
    rank 1                   samples 8 to 15      samples 0 to 15, other half        all ranks; ranks 1 and 3
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unisono
from unisono.plan.choose import predicted
from unisono.plan.layer_plan import PlanLike, make_plan
from unisono.plan.split import with_splits
from unisono.reducer import reducer_of
from unisono.rules import BSP, BaseRule, Exchange, Sharded
from unisono.step.rule import RankState
from unisono.tensor_parallel.choose_plan import PlanChoice, choose_plan
from unisono.tensor_parallel.model import split_of
from unisono.world import World

sys.path.insert(0, str(Path(__file__).parents[1] / "overlaps"))
from steps import gloo

from networks import PROBLEMS, Problem, network, plan_of, share, words

ROUNDS, WARMUP, TIMED = 3, 3, 2
"""Rounds, and steps of each contender in a round, before those that are timed, each by itself."""

COMPARED = 4
"""Number of the step, from 0, whose loss is compared."""

RATE, MOMENTUM = 0.01, 0.9
BUCKET = Exchange(bucket_bytes=4 << 20)


class Contender:
    """Ordinary loop, a step at a time: forward and backward pass, what `average` does to gradients, the update.

    `wait` waits for what a step has left pending.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        share: tuple[torch.Tensor, torch.Tensor],
        average: Callable[[], None] = lambda: None,
        wait: Callable[[], None] = lambda: None,
        plan: str = "",
    ) -> None:
        self.model, self._optimizer, self._share, self._average = model, optimizer, share, average
        self.wait, self.plan = wait, plan
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


STYLES: dict[str, Callable[[], Any]] = {
    "column gives part": lambda: ColwiseParallel(input_layouts=Shard(0)),
    "row takes part": lambda: RowwiseParallel(output_layouts=Shard(0)),
    "row takes part gives part": lambda: RowwiseParallel(output_layouts=Shard(-1)),
}
"""DTensor's styles of the same splits: each rank's own samples are a shard of the batch."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all use."""
    return torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)


def ours(problem: Problem, world: World, rule: BaseRule, plan: PlanLike | None = None) -> Contender:
    """Return ours, data parallel in all layers that a plan does not name."""
    model, data = network(problem), share(problem, world)
    optimizer = sgd(model)
    unisono.parallel(model, world, rule, optimizer if rule.traits.state is RankState.SHARDED else None, plan)
    reducer, split = reducer_of(model), split_of(model)
    assert reducer is not None
    return Contender(model, optimizer, data, wait=reducer.runner.wait, plan=str(split.plan) if split else "")


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
                flat = torch.cat([gradient.flatten() for gradient in gradients])
                dist.all_reduce(flat, group=group)
                flat /= world.size
                for gradient, mean in zip(
                    gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
                ):
                    gradient.copy_(mean.view_as(gradient))

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
    created = [dist.new_group(ranks, backend=backend) for ranks in groups]
    return next(group for group, ranks in zip(created, groups, strict=True) if world.rank in ranks)


def contenders(problem: Problem, world: World, auto: PlanLike) -> dict[str, Callable[[], Contender]]:
    """Return functions that make each contender; `auto` is the plan that `plan="auto"` chooses."""
    sizes, bsp = [size for size in (2, 4, 8) if size <= world.size], BSP(BUCKET, "chain")
    makes: dict[str, Callable[[], Contender]] = {
        "data parallel": partial(ours, problem, world, bsp),
        "Sharded": partial(ours, problem, world, Sharded(BUCKET, "chain")),
    }
    after = BSP(BUCKET, "none")
    makes["data parallel, no overlap"] = partial(ours, problem, world, after)
    for size in sizes:
        makes[f"hybrid, groups of {size}"] = partial(ours, problem, world, bsp, plan_of(problem, size))
        makes[f"hybrid, groups of {size}, no overlap"] = partial(ours, problem, world, after, plan_of(problem, size))
    makes["hybrid, auto"] = partial(ours, problem, world, bsp, auto)
    makes["hybrid, auto, no overlap"] = partial(ours, problem, world, after, auto)
    for backend in ("unisono", "gloo"):
        makes[f"DTensor, {backend}"] = partial(dtensor, problem, world, sizes[-1], backend)
        makes[f"FSDP2, {backend}"] = partial(fsdp2, problem, world, backend)
    return makes


def timed(world: World, step: Callable[[], None], wait: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of a step, those of the slowest rank."""
    world.barrier()
    began = time.perf_counter()
    step()
    wait()
    return max(world.all_gather_object(time.perf_counter() - began))


def references(problem: Problem, world: World) -> dict[str, float]:
    """Return the seconds in which all ranks, at once, compute a step, and those of an allreduce of all gradients."""
    model = network(problem)
    alone = Contender(model, sgd(model), share(problem, world))
    gradients = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    wide = sum(parameter.numel() for parameter in model[1].parameters()) / gradients.numel()
    facts = {"gradient_bytes": gradients.nbytes, "in_wide_layers": wide}
    steps = {"computing_s": alone.step, "exchange_alone_s": lambda: world.allreduce(gradients)}
    for name, step in steps.items():
        step()
        facts[name] = statistics.median(timed(world, step) for _ in range(5))
    return facts


def predictions(problem: Problem, world: World, chosen: PlanChoice) -> dict[str, float]:
    """Return the predicted seconds of a step, from what the choice of a plan measures now."""
    known = choose_plan(network(problem), world, share(problem, world)[0]).inputs
    assert known is not None
    assert chosen.plan is not None
    sizes = {"data parallel": 1} | {f"hybrid, groups of {size}": size for size in (2, 4, 8) if size <= world.size}
    plans = {name: make_plan(plan_of(problem, size)) for name, size in sizes.items()} | {"hybrid, auto": chosen.plan}
    steps = {}
    for suffix, overlap in (("", "chain"), (", no overlap", "none")):
        inputs = replace(known, step=known.step._replace(rule=BSP(BUCKET, overlap)))
        setting = known.setting._replace(overlap=overlap)
        for name, plan in plans.items():
            steps[name + suffix] = predicted(with_splits(inputs, plan.splits), setting).prediction.step
    return steps


def measure(
    result: dict[str, Any],
    world: World,
    makes: dict[str, Callable[[], Contender]],
    predict: Callable[[], dict[str, float]],
) -> None:
    """Add the predictions, losses and seconds of all contenders; a round begins with a prediction."""
    result |= {"predictions": [], "plans": {}, "seconds": {name: [] for name in makes}, "losses": {}}
    for index in range(ROUNDS):
        result["predictions"].append(predict())
        for name, make in makes.items():  # one at a time, as in a program of its own: others would take its memory
            contender = make()
            took = [timed(world, contender.step, contender.wait) for _ in range(WARMUP + TIMED)][WARMUP:]
            result["seconds"][name] += took
            result["plans"] |= {name: contender.plan} if contender.plan else {}
            result["losses"][name] = statistics.mean(world.all_gather_object(contender.losses[COMPARED]))
            del contender
            gc.collect()
            if world.rank == 0:
                print(f"round {index + 1}: {name} {', '.join(f'{each:.3f}' for each in took)} s", flush=True)
    result["predicted_s"] = {
        name: statistics.median(each[name] for each in result["predictions"]) for name in result["predictions"][0]
    }
    result["step_s"] = {name: statistics.median(each) for name, each in result["seconds"].items()}
    if max(result["losses"].values()) - min(result["losses"].values()) > 5e-5:
        raise SystemExit(f"losses after {COMPARED + 1} steps differ: {result['losses']}")


def main(output: str, rate: str, name: str, *chosen: str) -> None:
    """Measure all contenders, or some, on one network; what the file has of other networks and ranks stays there."""
    world, path, problem = unisono.init(), Path(output), PROBLEMS[name]
    dist.init_process_group("unisono")
    gloo(world)  # names the interface
    choice = choose_plan(network(problem), world, share(problem, world)[0])
    made = contenders(problem, world, choice.plan or {})
    makes = {key: make for key, make in made.items() if not chosen or key in chosen}
    result: dict[str, Any] = {"network": name, "hosts": world.size, "rate_bits": float(rate), "batch": problem.batch}
    result |= references(problem, world)
    measure(result, world, makes, partial(predictions, problem, world, choice))
    if world.rank == 0:
        print(
            json.dumps({key: result[key] for key in ("predicted_s", "plans", "step_s", "losses")}, indent=1), flush=True
        )
        rows = json.loads(path.read_text()) if path.exists() else []
        rows = [row for row in rows if (row["network"], row["hosts"]) != (name, world.size)]
        path.write_text(json.dumps([*rows, result], indent=1) + "\n")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
