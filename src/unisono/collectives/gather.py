"""Gather: the root receives the tensors of all ranks.

3 ranks, root 0; of lengths 1, 2 and 1:

    rank 0   a        parts of rank 0   a | b b | c
    rank 1   b b
    rank 2   c

Rounds: 1. The root receives the bytes of all other ranks, which is the minimum; each other rank sends its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.call import call_of
from unisono.collectives.all_to_all_v import send_and_receive
from unisono.collectives.checks import Checks, check_memory, check_parts, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import copy_back, name_of, nbytes_of, receive_buffer, send_buffer


def gather(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """Fill parts[r] on the root with the `tensor` of rank r. Only the root reads `parts`. Any shape and stride.
    The root's own part may be its `tensor`.

    Raises UsageError for a root that is not a rank, TensorError unless there is one part per rank, all of the tensor's
    dtype, and MismatchError on every rank, naming both lengths, when a part does not fit the tensor sent to it.
    """
    at_root = (parts or ()) if group.rank == root else ()
    with Checks(group, "gather"):
        nbytes_of(tensor)
        check_root(group, root, "gather")
        if group.rank == root:
            check_parts(group, at_root, tensor.dtype, "gather")
            check_memory(group, "gather", at_root, [tensor], own=[(root, 0)])
    buffers = [receive_buffer(part) for part in at_root]
    call = call_of(f"gather({name_of(tensor.dtype)}, root {root})")
    send_and_receive(group, {root: send_buffer(tensor)}, dict(enumerate(buffers)), call, rooted=True)
    copy_back(at_root, buffers)
