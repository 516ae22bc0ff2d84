"""Reduce: the root ends with the reduction of all ranks' tensors.

4 ranks, root 0; a payload of 4 chunks, A to D:

                         reduce_scatter    gather
    rank 0   A B C D     A'             A' B' C' D'        x' is the sum, or another reduction, of all ranks' x
    rank 1   A B C D       B'           A B C D
    rank 2   A B C D         C'         A B C D
    rank 3   A B C D           D'       A B C D

Rounds: those of `reduce_scatter` plus 1. Bytes: each rank sends n(p-1)/p, then each but the root n/p. So no link
carries more than 2n(p-1)/p, for any number of ranks. On one node each rank reduces its segment in shared memory, and
only the root copies the segments out (`transports/staging.py`).
"""

from __future__ import annotations

import torch

from unisono.call import Call, call_of
from unisono.collectives.all_to_all_v import send_and_receive
from unisono.collectives.checks import Checks, check_output, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import flat_of, memory_of, name_of, nbytes_of
from unisono.collectives.reduce_scatter import reduce_scatter
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import arithmetic_of


def reduce(group: Group, tensor: torch.Tensor, root: int, op: str = "sum") -> None:
    """Reduce `tensor` over all ranks into the root's, in place. Other ranks' tensors do not change. Any shape, stride.

    `op` and errors are those of `allreduce`. Also raises UsageError for a root that is not a rank.
    """
    with Checks(group, "reduce"):
        nbytes_of(tensor)
        check_root(group, root, "reduce")
        if group.rank == root:
            check_output(group, tensor, "reduce")
        arithmetic = arithmetic_of(tensor.dtype, op)
    if group.size == 1:
        return
    named = "" if op == "sum" else f", op {op}"
    call = call_of(f"reduce({tensor.numel()} x {name_of(tensor.dtype)}, root {root}{named})")
    flat = flat_of(tensor)
    if group.uses_shared_memory(call):
        view, itemsize = arithmetic.view(memory_of(flat)), tensor.dtype.itemsize
        group.memory_for(call).staging.reduce(view, itemsize, arithmetic, call, root)()
    else:
        _by_parts(group, flat, root, op, call)
    if group.rank == root and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def _by_parts(group: Group, flat: torch.Tensor, root: int, op: str, call: Call) -> None:
    ends = [bounds(len(flat), group.size, rank) for rank in range(group.size)]
    chunks = {rank: flat[start:stop] for rank, (start, stop) in enumerate(ends)} if group.rank == root else {}
    with group.enter_call(call):
        group.check_same_call(call)
        shard = reduce_scatter(group, flat, op=op)
        send_and_receive(group, {root: shard}, chunks, call)
