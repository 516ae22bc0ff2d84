"""Broadcast: every rank ends with what one of them had."""

from __future__ import annotations

import torch

from unisono.collectives.checks import Checks, check_output, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import carrier_of, flat_of, memory_of, name_of, nbytes_of
from unisono.mpi import MPI
from unisono.transports.windows import call


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0, algorithm: str = "auto") -> torch.Tensor:
    """Give every rank what rank `root` holds in `tensor`, in place, and return it: any dtype, shape and stride."""
    with Checks(group, "broadcast"):
        check_root(group, root, "broadcast")
        if group.rank != root:
            check_output(group, tensor, "broadcast")
        plan = group.plan("broadcast", algorithm, tensor.dtype, nbytes_of(tensor), carrier=carrier_of(tensor))
    if group.size == 1:
        return tensor
    flat = flat_of(tensor)
    what = call(f"broadcast({tensor.numel()} x {name_of(tensor.dtype)}, root {root}, {plan.choice.algorithm})")
    if plan.choice.algorithm == "library":
        with group.library_call(what):
            group.comm.Bcast([memory_of(flat), MPI.BYTE], root)
    else:
        with group.call(what) as number:
            group.agree(what)  # nobody waits for the ranks below it in a tree: a difference might go unnoticed
            group.play(group.broadcast_from(plan.choice.algorithm, root), flat.view(carrier_of(flat)), number, plan)
    if group.rank != root and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor
