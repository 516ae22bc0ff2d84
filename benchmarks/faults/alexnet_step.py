"""Times steps of AlexNet on one node, with its exchange and without. Started on the ranks by cost.py with OUTPUT.

It takes `one_node` from PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from one_node import BATCH, alexnet

import unisono

STEPS = 8


def main(output: str) -> None:
    """Write the seconds of each step, of the rank that took longest: both by turns."""
    world = unisono.init()
    images = torch.randn(BATCH, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (BATCH,))
    model, alone = alexnet(torch.float32), alexnet(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    alone_optimizer = torch.optim.SGD(alone.parameters(), 1e-3, momentum=0.9)
    rule = unisono.BSP(unisono.Exchange(bucket_bytes=8 << 20), "chain")
    trainer = unisono.Trainer(model=model, world=world, rule=rule, optimizer=optimizer)

    def ours() -> None:
        trainer.step(images, labels)
        trainer.wait()

    def without() -> None:
        alone_optimizer.zero_grad()
        torch.nn.functional.cross_entropy(alone(images), labels).backward()
        alone_optimizer.step()

    calls: dict[str, Callable[[], None]] = {"step": ours, "alone": without}
    took: dict[str, list[float]] = {name: [] for name in calls}
    for step in range(2 + STEPS):
        for name, call in calls.items():
            world.barrier()
            begun = time.perf_counter()
            call()
            if step >= 2:
                took[name].append(max(world.comm.allgather(time.perf_counter() - begun)))
    if world.rank == 0:
        Path(output).write_text(json.dumps(took))
    world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
