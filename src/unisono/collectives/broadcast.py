"""Broadcast: every rank ends with a copy of the root's tensor."""

from __future__ import annotations

from functools import partial

import torch

from unisono.collectives.checks import Checks, check_output, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import move_dtype_of, nbytes_of, send_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host


def broadcast(group: Group, tensor: torch.Tensor, root: int = 0, algorithm: str = "auto") -> torch.Tensor:
    """Copy rank `root`'s `tensor` into `tensor` on every rank, and return it. Any dtype, shape and stride."""
    parameters = "broadcast", root, algorithm
    if start_ready(group, parameters, tensor):
        return tensor
    if is_on_device(tensor):
        on_host(group, "broadcast", (tensor,), (tensor,), partial(broadcast, group, root=root, algorithm=algorithm))
        return tensor
    with Checks(group, "broadcast"):
        check_root(group, root, "broadcast")
        if group.rank != root:
            check_output(group, tensor, "broadcast")
        nbytes_of(tensor)
        move_dtype = move_dtype_of(tensor)
        plan = group.plan("broadcast", algorithm, tensor, op=None, root=root, move_dtype=move_dtype)
    if group.size == 1:
        return tensor
    sent = send_buffer(tensor)
    start_and_keep(group, parameters, prepare(group, plan)(sent.data_ptr(), sent.data_ptr()), sent)
    if group.rank != root and sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent.view(tensor.shape))
    return tensor
