"""Ranks train with DistributedDataParallel; in the midst of a backward pass rank 1 fails, as it is told to."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

import unisono  # noqa: F401 - registers the backend

HOW = sys.argv[1]
STEPS, FAILING = 1000, 3

dist.init_process_group("unisono")
rank = dist.get_rank()
network = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.02)
step = 0


def fail(_: torch.Tensor) -> None:
    """Called in the middle of each backward pass, when the first buckets are on their way."""
    if rank != 1 or step != FAILING:
        return
    if HOW == "raise":
        raise ValueError("a value of rank 1")
    if HOW == "exit":
        os._exit(0)
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


network[1].weight.register_hook(fail)
print("begun", flush=True)
for step in range(STEPS):
    if HOW.startswith("leave") and step == FAILING:
        if rank == 1:
            sys.exit(0)
        if HOW != "leave":
            dist.recv(torch.ones(1), 1)
    model(torch.randn(2, 64)).sum().backward()
