"""Times a training step of AlexNet with DistributedDataParallel by unisono, its buckets in bfloat16, and by gloo.

Started on the ranks by run.py:  ddp_step.py OUTPUT STEPS
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from operations import gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.torch_backend import Options

BATCH = 16


def alexnet() -> nn.Module:
    """AlexNet in one column (61 million parameters), without dropout: every step computes the same."""
    features = [
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 2)),
    ]
    classifier = [nn.Linear(256 * 6 * 6, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True)]
    return nn.Sequential(*features, nn.Flatten(), *classifier, nn.Linear(4096, 1000))


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Forward, backward with the exchange, and plain gradient descent."""
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)


def main(output: str, steps: str) -> None:
    """Both contenders and the step without an exchange, by turns."""
    world = unisono.init()
    torch.manual_seed(0)
    dist.init_process_group("unisono", pg_options=Options(wire="bfloat16"))
    alone, groups = alexnet(), {"unisono, bfloat16": dist.group.WORLD, "gloo": gloo(world)}
    models = {name: DistributedDataParallel(alexnet(), process_group=group) for name, group in groups.items()}
    models["without exchange"] = alone
    images, labels = torch.randn(BATCH, 3, 224, 224), torch.randint(0, 1000, (BATCH,))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for index in range(int(steps) + 1):
        for name, model in models.items():
            world.barrier()
            start = time.perf_counter()
            step(model, images, labels)
            took = max(world.all_gather_object(time.perf_counter() - start))
            if index:  # the first is to get ready
                seconds[name].append(took)
            if world.rank == 0:
                print(f"step {index}: {name} {took:.2f} s", flush=True)
    if world.rank == 0:
        medians = {name: statistics.median(took) for name, took in seconds.items()}
        results = {"ranks": world.size, "nodes": world.nodes, "median_s": medians, "seconds": seconds}
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
        print(f"gloo / unisono: {medians['gloo'] / medians['unisono, bfloat16']:.2f}")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
