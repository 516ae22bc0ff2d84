"""Reduce: the root ends with the reduction of all ranks' tensors. Broadcast, its mirror image: every rank ends with a
copy of the root's.

4 ranks, root 0:

    rank 0   1         10
    rank 1   2   ──▶    2
    rank 2   3          3
    rank 3   4          4

Across nodes the schedule determines rounds and bytes: down a tree, or along a chain, in which no link carries more than
n bytes. On one node each rank reduces its segment in shared memory, and only the root copies the segments out
(`transports/fused.py`).
"""

from __future__ import annotations

from functools import partial

import torch

from unisono.call import call_of
from unisono.collectives.checks import Checks, check_output, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import name_of, nbytes_of, put_back, send_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host
from unisono.transports.arithmetic import arithmetic_of
from unisono.transports.fused import staged_reduce
from unisono.transports.plan import Plan


def reduce(group: Group, tensor: torch.Tensor, root: int, op: str = "sum") -> None:
    """Reduce `tensor` over all ranks into the root's, in place. Other ranks' tensors do not change. Any shape, stride.

    `op` and errors are those of `allreduce`. Also raises UsageError for a root that is not a rank.
    """
    parameters = "reduce", root, op
    if start_ready(group, parameters, tensor):
        return
    if is_on_device(tensor):
        written = (tensor,) if group.rank == root else ()
        on_host(group, "reduce", (tensor,), written, partial(reduce, group, root=root, op=op))
        return
    with Checks(group, "reduce"):
        nbytes_of(tensor)
        check_root(group, root, "reduce")
        if group.rank == root:
            check_output(group, tensor, "reduce")
        arithmetic_of(tensor.dtype, op)  # raises for what cannot be reduced
    if group.size == 1:
        return
    named = "" if op == "sum" else f", op {op}"
    call = call_of(f"reduce({tensor.numel()} x {name_of(tensor.dtype)}, root {root}{named})")
    sent = send_buffer(tensor)
    if (memory := group.shared_memory(call)) is not None:
        plan = Plan("reduce", "direct", "windows", sent.numel(), tensor.dtype, None, op, root, call)
        play = staged_reduce(memory, plan, sent.data_ptr(), root)
    else:
        play = prepare(group, group.plan("reduce", "auto", tensor, op=op, root=root))(sent.data_ptr(), sent.data_ptr())
    start_and_keep(group, parameters, play, sent)
    if group.rank == root:
        put_back(tensor, sent)


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
        plan = group.plan("broadcast", algorithm, tensor, op=None, root=root)
    if group.size == 1:
        return tensor
    sent = send_buffer(tensor)
    start_and_keep(group, parameters, prepare(group, plan)(sent.data_ptr(), sent.data_ptr()), sent)
    if group.rank != root:
        put_back(tensor, sent)
    return tensor
