"""What the ranks of the benchmark do: they train, or measure steps and sums. `run.py` starts them."""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono
from unisono.data.builtin import load_digits
from unisono.models import make_network
from unisono.network.pace import PIECE_SECONDS
from unisono.placement import place
from unisono.transports.arithmetic import perform
from unisono.transports.exact import ExactArithmetic
from unisono.world import World

SHARES, BATCH, STEPS, ROUNDS = 8, 64, 10, 60


class Mirror(nn.Module):
    """Augmentation: each image is mirrored, or not, by the random numbers of its share."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flips = torch.rand(len(images), 1, 1, 1) < 0.5 if self.training else torch.zeros(len(images), 1, 1, 1).bool()
        return torch.where(flips, images.flip(-1), images)


class GPT(nn.Module):
    """Two layers with dropout, on the pixels of a digit as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(self.embedding((images.flatten(1) * 16).long())).mean(1))
        return scores


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return GPT() if name == "gpt" else nn.Sequential(Mirror(), make_network(name, "", 10, 1))


def trained(world: World, setting: dict[str, Any]) -> str:
    """SHA-256 of the weights and buffers of rank 0 after some steps."""
    model, kind = network(setting["network"]), {"bsp": unisono.BSP, "sharded": unisono.Sharded}[setting["rule"]]
    exchange = unisono.Exchange(setting["algorithm"], None, setting["bucket_bytes"])
    rule, optimizer = kind(exchange, setting["overlap"]), torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    data, order = load_digits().train, torch.randperm(1437, generator=torch.Generator().manual_seed(1))
    if setting["trainer"]:
        trainer = unisono.Trainer(model, world, rule, optimizer, virtual_ranks=SHARES)
    else:
        unisono.parallel(model, world, rule, optimizer, virtual_ranks=SHARES)
    for step in range(STEPS):
        rows = order[step * BATCH : step * BATCH + (29 if step == STEPS // 2 else BATCH)]
        share = unisono.own_samples(model, len(rows))
        inputs, labels = data.inputs[rows[share.start : share.stop]], data.labels[rows[share.start : share.stop]]
        if setting["trainer"]:
            trainer.step(inputs, labels, len(rows))
            continue
        for some, targets in unisono.shares(model, inputs, labels, whole=len(rows)):
            nn.functional.cross_entropy(model(some), targets).backward()
        optimizer.step()
    if setting["trainer"]:
        trainer.wait()
    state = model.state_dict().values()
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in state)).hexdigest()


def compared(
    world: World,
    what: str,
    plain: Callable[[], object],
    exact: Callable[[], object],
    before: Callable[[], object],
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """Median milliseconds of both, which take turns, the slowest rank's of each round, and the ratios of the rounds."""
    seconds: dict[str, list[float]] = {"plain": [], "exact": []}
    pair = ("plain", plain), ("exact", exact)
    for index in range(rounds):
        for name, act in pair if index % 2 else pair[::-1]:
            before()
            world.barrier()
            began = time.perf_counter()
            act()
            seconds[name].append(max(world.all_gather_object(time.perf_counter() - began)))
    medians = {name: 1e3 * statistics.median(times[3:]) for name, times in seconds.items()}
    ratios = [late / early for early, late in zip(seconds["plain"][3:], seconds["exact"][3:], strict=True)]
    return {"what": what, **medians, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def costs(world: World) -> list[dict[str, Any]]:
    """Sums of tensors that were just written, and steps of networks, with V = p."""
    results = []
    for kibibytes in (64, 1024, 16_384):
        source = torch.randn(kibibytes << 8)
        for memory, tensor in (("shared", world.empty(len(source), torch.float32)), ("own", torch.empty(len(source)))):
            results.append(
                compared(
                    world,
                    f"allreduce of {kibibytes} KiB in {memory} memory",
                    lambda tensor=tensor: world.allreduce(tensor),  # type: ignore[misc]
                    lambda tensor=tensor: world.allreduce(tensor, wire="exact"),  # type: ignore[misc]
                    lambda tensor=tensor, source=source: tensor.copy_(source),  # type: ignore[misc]
                )
            )
    data = load_digits().train
    for name in ("small_convnet", "resnet8"):
        steps = []
        for shares in (0, world.size):
            model = network(name)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            rule = unisono.BSP(unisono.Exchange(bucket_bytes=1 << 20), "chain")
            trainer = unisono.Trainer(model, world, rule, optimizer, virtual_ranks=shares)
            rows = slice(BATCH * world.rank, BATCH * (world.rank + 1))

            def step(trainer: unisono.Trainer = trainer, rows: slice = rows) -> None:
                trainer.step(data.inputs[rows], data.labels[rows])
                trainer.wait()

            steps.append(step)
        results.append(compared(world, f"step of {name}, {BATCH} samples a rank", *steps, lambda: None))
    return results


def errors() -> list[dict[str, Any]]:
    """Largest and mean error of sums of the shares' gradients in the steps of a run: exact ones, and float32's in the
    order of ranks; beside sums in float64."""
    rows, data = [], load_digits().train
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(1))
    for name in ("small_convnet", "resnet8", "gpt"):
        model, apart = network(name), dict[str, list[torch.Tensor]](exact=[], serial=[])
        parameters, magnitudes = list(model.parameters()), []
        optimizer = torch.optim.SGD(parameters, 0.05, momentum=0.9)
        for step in range(STEPS):
            terms = []
            for share in order[step * BATCH : (step + 1) * BATCH].chunk(SHARES):
                loss = nn.functional.cross_entropy(model(data.inputs[share]), data.labels[share])
                terms.append([gradient / SHARES for gradient in torch.autograd.grad(loss, parameters)])
            for parameter, *shares in zip(parameters, *terms, strict=True):
                flat = torch.stack([gradient.flatten() for gradient in shares])
                true, serial, exact = flat.double().sum(0), torch.zeros_like(flat[0]), torch.empty_like(flat[0])
                for term in flat:
                    serial += term
                arrays = [term.numpy() for term in flat]
                perform(ExactArithmetic(torch.float32).reduce(arrays, exact.numpy()))
                for kind, total in (("exact", exact), ("serial", serial)):
                    apart[kind].append((total - true).abs())
                magnitudes.append(true.abs())
                parameter.grad = exact.view_as(parameter)
            optimizer.step()
        row: dict[str, Any] = {"network": name, "mean": float(torch.cat(magnitudes).mean())}
        for kind, values in apart.items():
            row |= {f"{kind} largest": float(torch.cat(values).max()), f"{kind} mean": float(torch.cat(values).mean())}
        rows.append(row)
    return rows


def main(task: str, given: str, output: str) -> None:
    world, results = unisono.init(), list[Any]()
    torch.set_num_threads(1)
    for setting in json.loads(Path(given).read_text()):
        two = setting["nodes"] == 2 and world.size > 1
        placement = place([rank % 2 for rank in range(world.size)]) if two else world.placement
        table = world.table
        if (piece := setting["piece_bytes"]) is not None:
            table = replace(table, network=replace(table.network, beta=PIECE_SECONDS / piece))
        run_world = World(world.comm.Dup(), placement, table)
        results.append(trained(run_world, setting))
        run_world.free()
    if task == "measure":
        results = [costs(world), errors()]
    world.call_on_root(lambda: Path(output).write_text(json.dumps(results)))


if __name__ == "__main__":
    main(*sys.argv[1:])
