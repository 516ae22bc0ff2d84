"""The `unisono` backend of torch.distributed: a thin adapter over the collectives.

import torch.distributed as dist
import unisono                                  # registers the backend

dist.init_process_group("unisono")              # under mpiexec or srun; alone, a world of one
dist.init_process_group("unisono", pg_options=Options(wire="bfloat16"))

    dist.all_reduce ──▶ operations.py         each operation of PyTorch as a collective
                        process_group.py      its work ── work.py: one at a time; wait, error, future
                    ──▶ collectives/allreduce.py

messages.py         send and recv
program.py          groups of ours in a program that asks for gloo, under `unisono run`
"""

from unisono.torch_backend.register import Options, name, register

__all__ = ["Options", "name", "register"]
