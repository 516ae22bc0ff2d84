"""The `unisono` backend of torch.distributed: a thin adapter over the collectives.

import torch.distributed as dist
import unisono                                  # registers the backend

dist.init_process_group("unisono")              # under mpiexec or srun; alone, a world of one
dist.init_process_group("unisono", pg_options=Options(wire="bfloat16"))

process_group.py    the interface that PyTorch calls, each operation mapped to a collective
submission_queue.py one operation of a group at a time, in order of submission
work.py             handle of an operation: wait, error, future
stand_in.py         groups of ours in a program that asks for gloo, under `unisono run`
watchdog.py         ranks that are missing, ranks that have exited, timeouts
"""

from unisono.torch_backend.options import Options
from unisono.torch_backend.register import name, register

__all__ = ["Options", "name", "register"]
