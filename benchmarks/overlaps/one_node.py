"""Times training steps of AlexNet on one node: ours, PyTorch's DDP on gloo, and the step without exchange.

Started on the ranks by run.py:  one_node.py OUTPUT DTYPE BLOCK EMBEDDING...
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from steps import Step, gloo
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono

BATCH, ROUNDS = 16, 5


def alexnet(dtype: torch.dtype) -> nn.Module:
    """AlexNet in one column (61 million parameters), without dropout: every step computes the same."""
    features = [
        *(nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(True)),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 2)),
    ]
    classifier = [nn.Linear(256 * 6 * 6, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True)]
    network = nn.Sequential(*features, nn.Flatten(), *classifier, nn.Linear(4096, 1000))
    return network.to(dtype, memory_format=torch.channels_last)


def main(output: str, dtype_name: str, block: str, *overlaps: str) -> None:
    """All contenders, by turns."""
    world = unisono.init()
    dist.init_process_group("unisono")
    peers = gloo(world)
    dtype, count = getattr(torch, dtype_name), int(block)
    images = torch.randn(BATCH, 3, 224, 224).to(dtype, memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (BATCH,))
    trainers: dict[str, unisono.Trainer] = {}
    steps: dict[str, Step] = {}
    for overlap in overlaps:
        model = alexnet(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        trainer = trainers[overlap] = unisono.Trainer(
            model,
            world,
            unisono.BSP(unisono.Exchange(bucket_bytes=None if overlap == "auto" else 8 << 20), overlap),
            optimizer,
        )
        trainer.reducer.programs.log_with(lambda line: print(line, flush=True))
        steps[overlap] = lambda trainer=trainer: trainer.step(images, labels)

    def plain(model: nn.Module) -> Step:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        return step

    steps["DDP on gloo"] = plain(
        DistributedDataParallel(alexnet(dtype), process_group=peers, gradient_as_bucket_view=True)
    )
    steps["without exchange"] = plain(alexnet(dtype))
    for name, step in steps.items():
        while name in trainers and trainers[name].reducer.programs.tuning.state() is None:
            step()
        for _ in range(2):
            step()
        if name in trainers:
            trainers[name].wait()
    took: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            world.barrier()
            start = time.perf_counter()
            for _ in range(count):
                step()
            if name in trainers:
                trainers[name].wait()
            took[name].append(max(world.all_gather_object(time.perf_counter() - start)) / count)
    if world.rank == 0:
        medians = {name: statistics.median(each) for name, each in took.items()}
        settings = {name: list(trainer.reducer.programs.tuning.setting[:2]) for name, trainer in trainers.items()}
        results = {"ranks": world.size, "dtype": dtype_name, "settings": settings, "step_s": medians, "seconds": took}
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
        print("  ".join(f"{name} {seconds:.3f} s" for name, seconds in medians.items()))
        print(f"DDP on gloo / {overlaps[0]}: {medians['DDP on gloo'] / medians[overlaps[0]]:.2f}")
    world.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
