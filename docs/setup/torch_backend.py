"""A program that was written for torchrun, and the same as a module."""

from pathlib import Path

PROGRAM = """
import argparse

import torch
import torch.distributed as dist

from unisono.torch_backend import name

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=1)
epochs = options.parse_args().epochs
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for _ in range(epochs):
    model(torch.ones(3, 4)).sum().backward()
assert name() == "unisono"
dist.destroy_process_group()
"""

Path("train.py").write_text(PROGRAM)
Path("package").mkdir()
Path("package/__init__.py").touch()
Path("package/train.py").write_text(PROGRAM)
