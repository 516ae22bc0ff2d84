"""Memory of a rank that trains VGG-16 with Adam, under BSP and Sharded.

mpiexec -n 4 python benchmarks/sharded/memory.py bsp OUT.json
mpiexec -n 4 python benchmarks/sharded/memory.py sharded OUT.json     adds to OUT.json

Each rank makes three steps of one image. A process runs one rule, since its peak never falls.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch

import unisono
from unisono.models.convnet import vgg16

STEPS = 3
RULES = {"bsp": unisono.BSP, "sharded": unisono.Sharded}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's state on this rank."""
    tensors = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(value.numel() * value.element_size() for value in tensors)


def main(rule: str, output: str) -> None:
    """Train by a rule, and write the memory of the ranks."""
    world = unisono.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = vgg16(1000)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    trainer = unisono.Trainer(model, world, RULES[rule](), optimizer)
    for _ in range(STEPS):
        trainer.step(torch.randn(1, 3, 224, 224), torch.tensor([1]))
    trainer.wait()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    of_ranks = world.all_gather_object({"peak": peak, "optimizer": state_bytes(optimizer)})
    if world.rank == 0:
        path = Path(output)
        content = json.loads(path.read_text()) if path.exists() else {}
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        content[rule] = {"ranks": world.size, "weights_bytes": weights, "bytes": of_ranks}
        path.write_text(json.dumps(content, indent=1) + "\n")
        for name in ("optimizer", "peak"):
            print(f"{rule}: {name} {max(of_rank[name] for of_rank in of_ranks) / 1e6:,.0f} MB on a rank", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
