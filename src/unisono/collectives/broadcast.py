"""Broadcast: every rank ends with what one of them had."""

from __future__ import annotations

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import memory_of, name_of, nbytes_of
from unisono.errors import UsageError
from unisono.mpi import MPI
from unisono.transports.windows import call


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Give every rank what rank `root` holds in `tensor`, in place, and return it: any dtype, shape and stride."""
    nbytes_of(tensor)
    if not 0 <= root < group.size:
        raise UsageError(f"rank {group.rank}: broadcast from root {root}; the group has ranks 0 to {group.size - 1}")
    if group.size > 1:
        what = call(f"broadcast({tensor.numel()} x {name_of(tensor.dtype)}, root {root})")
        flat = tensor.detach().contiguous()
        with group.call(what, in_library=True):
            group.agree(what)
            group.comm.Bcast([memory_of(flat), MPI.BYTE], root)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
    return tensor
