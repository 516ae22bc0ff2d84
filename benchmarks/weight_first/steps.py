"""Times steps of a network with the weight gradients first and in PyTorch's order, by turns.

Started on the ranks by run.py:  steps.py OUTPUT NETWORK SAMPLES ROUNDS
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.engine import OperationSpan
from unisono.models import make_network
from unisono.reducer.weight_first import KINDS
from unisono.step.program import Task

ORDERS = {"weights first": KINDS, "PyTorch's order": {first: stock for stock, first in KINDS.items()}}
"""Classes that layers become, by the classes that they leave, by the name of the order."""

BUCKET_BYTES = 8 << 20
SIDE, CLASSES = 224, 1000


class Times:
    """Begins of the tasks of a step, in seconds since its backward pass began."""

    def __init__(self) -> None:
        self.began = 0.0
        self.begins: dict[tuple[str, int], float] = {}

    def loss(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss; the backward pass begins after it."""
        loss = nn.functional.cross_entropy(scores, labels)
        self.began, self.begins = time.perf_counter(), {}
        return loss

    def __call__(self, span: OperationSpan) -> None:
        if isinstance(span.about, Task):
            self.begins[span.about.operation.name, span.about.key] = span.begin - self.began


def first_buckets(trainer: unisono.Trainer) -> dict[str, int]:
    """Return the key of the bucket that is sent first of those that hold a weight, by the weight's name."""
    names, keys = [name for name, _ in trainer.model.named_parameters()], dict[str, int]()
    for key, bucket in enumerate(trainer.reducer.programs.layout().buckets, 1):
        for parameter in bucket.parameters:
            if names[parameter].endswith("weight"):
                keys.setdefault(names[parameter], key)
    return keys


class Measured:
    """Seconds of the measured steps of one order."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.passes: list[float] = []
        self.begins: dict[str, list[float]] = defaultdict(list)
        """Begins of each layer's exchange, since the backward pass began."""

    def shares(self) -> dict[str, list[float]]:
        """Return the begins as shares of the backward pass."""
        return {
            layer: [begin / seconds for begin, seconds in zip(begins, self.passes, strict=True)]
            for layer, begins in self.begins.items()
        }


def main(output: str, name: str, samples: str, rounds: str) -> None:
    """Measure one network, and write what rank 0 found."""
    torch.manual_seed(0)
    world, times = unisono.init(), Times()
    model = make_network(name, "", CLASSES, 3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # every step computes the same
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    rule = unisono.BSP(unisono.Exchange(bucket_bytes=BUCKET_BYTES), "chain")
    trainer = unisono.Trainer(model, world, rule, optimizer, loss=times.loss)
    trainer.reducer.observe = times
    images, labels = torch.randn(int(samples), 3, SIDE, SIDE), torch.randint(0, CLASSES, (int(samples),))
    while trainer.reducer.programs.tuning.state() is None:
        trainer.step(images, labels)
    layers, measured = first_buckets(trainer), {order: Measured() for order in ORDERS}
    for turn in range(int(rounds)):
        for order in ORDERS if turn % 2 else reversed(ORDERS):
            run = measured[order]
            for module in model.modules():
                module.__class__ = ORDERS[order].get(type(module), type(module))
            trainer.step(images, labels)
            trainer.wait()
            world.barrier()
            start = time.perf_counter()
            trainer.step(images, labels)
            run.passes.append(time.perf_counter() - times.began)
            trainer.wait()
            run.steps.append(max(world.all_gather_object(time.perf_counter() - start)))
            for layer, key in layers.items():
                run.begins[layer].append(times.begins["allreduce", key])
    if world.rank == 0:
        results = {
            "network": name,
            "samples": int(samples),
            "ranks": world.size,
            "step_s": {order: run.steps for order, run in measured.items()},
            "backward_s": {order: run.passes for order, run in measured.items()},
            "begin_s": {order: run.begins for order, run in measured.items()},
            "begin_share": {order: run.shares() for order, run in measured.items()},
        }
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
        for order, run in measured.items():
            print(f"{name}, {order}: {statistics.median(run.steps):.3f} s a step")


if __name__ == "__main__":
    main(*sys.argv[1:])
