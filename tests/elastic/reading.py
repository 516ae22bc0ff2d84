"""A program of a user that reads a pack, and keeps its loader: python reading.py PACK FOLDER KILLED.

It writes the hash of the weights, and what the last loader says. Rank 1 ends itself in step KILLED of generation 1.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unisono
from unisono.data import Loader
from unisono.elastic import Loop

STEPS, BATCH = 12, 12


def main(pack: str, folder: str, killed: int) -> None:
    world = unisono.init()
    torch.manual_seed(0)
    loader = Loader(pack, world, BATCH, virtual_ranks=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, loader.classes))
    model = unisono.parallel(model, world, virtual_ranks=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loop = Loop(world, model=model, optimizer=optimizer, loader=loader)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()
    for step in loop.steps(STEPS):
        inputs, labels = next(source)
        optimizer.zero_grad()
        for rows, wanted in unisono.shares(model, inputs, labels, whole=BATCH):
            nn.functional.cross_entropy(model(rows), wanted).backward()
        optimizer.step()
        if step == 3:
            time.sleep(0.6)
        if step == killed and world.rank == 1 and os.environ.get("UNISONO_GENERATION", "1") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()
    if world.rank == 0:
        states = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        Path(folder, "hash").write_text(hashlib.sha256(states).hexdigest())
        Path(folder, "notes").write_text("\n".join(loader.notes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
