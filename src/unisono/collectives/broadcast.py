"""Broadcast: every rank ends with a copy of the root's tensor."""

from __future__ import annotations

from functools import partial

import torch

from unisono.collectives.checks import Checks, check_output, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import flat_of, move_dtype_of, nbytes_of
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0, algorithm: str = "auto") -> torch.Tensor:
    """Copy rank `root`'s `tensor` into `tensor` on every rank, and return it. Any dtype, shape and stride."""
    parameters = "broadcast", root, algorithm
    if start_ready(group, parameters, tensor):
        return tensor
    if is_on_device(tensor):
        call = partial(broadcast, group, root=root, algorithm=algorithm)
        return on_host(group, "broadcast", (tensor,), (tensor,), call)  # type: ignore[no-any-return]
    with Checks(group, "broadcast"):
        check_root(group, root, "broadcast")
        if group.rank != root:
            check_output(group, tensor, "broadcast")
        nbytes_of(tensor)
        move_dtype = move_dtype_of(tensor)
        plan = group.plan("broadcast", algorithm, tensor, op=None, root=root, move_dtype=move_dtype)
    if group.size == 1:
        return tensor
    flat = flat_of(tensor)
    start_and_keep(group, parameters, prepare(group, plan)(flat.data_ptr(), flat.data_ptr()), flat)
    if group.rank != root and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor
