"""A program of a user with a loop whose state is kept: python summing.py FOLDER KILLED. It writes what it has learnt.

Rank 1 ends itself in step KILLED of the first generation; step 3 is slower than the time between two copies.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.elastic import Loop

STEPS, BATCH = 12, 12


def main(folder: str, killed: int) -> None:
    world = unisono.init()
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)
    model = unisono.parallel(nn.Sequential(*layers), world, virtual_ranks=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loop = Loop(world, model=model, optimizer=optimizer)
    for step in loop.steps(STEPS):
        batch = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))
        own = unisono.own_samples(model, BATCH)
        rows = batch[own.start : own.stop]
        optimizer.zero_grad()
        for (share,) in unisono.shares(model, rows, whole=BATCH):
            model(share).square().mean().backward()
        optimizer.step()
        if step == 3:
            time.sleep(0.6)
        if world.rank == 0:
            with Path(folder, "steps").open("a") as file:
                file.write(f"{step}\n")
        if step == killed and world.rank == 1 and os.environ.get("UNISONO_GENERATION", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    if world.rank == 0:
        states = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        Path(folder, "hash").write_text(hashlib.sha256(states).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
