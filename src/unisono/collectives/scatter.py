"""Scatter: the root sends each rank its part.

3 ranks, root 0; of lengths 1, 2 and 1:

    parts of rank 0   a | b b | c        rank 0   a
                                         rank 1   b b
                                         rank 2   c

Rounds: 1. The root sends the bytes of all other ranks, which is the minimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.call import call_of
from unisono.collectives.all_to_all_v import send_and_receive
from unisono.collectives.checks import Checks, check_memory, check_parts, check_root
from unisono.collectives.group import Group
from unisono.collectives.payload import copy_back, name_of, nbytes_of, receive_buffer, send_buffer


def scatter(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """Fill the `tensor` of rank r with the root's parts[r]. Only the root reads `parts`. Any shape and stride.
    The root's `tensor` may be its own part.

    Raises UsageError for a root that is not a rank, TensorError unless there is one part per rank, all of the tensor's
    dtype, and MismatchError on every rank, naming both lengths, when a part does not fit the tensor of its rank.
    """
    at_root = (parts or ()) if group.rank == root else ()
    with Checks(group, "scatter"):
        nbytes_of(tensor)
        check_root(group, root, "scatter")
        if group.rank == root:
            check_parts(group, at_root, tensor.dtype, "scatter")
        check_memory(group, "scatter", [tensor], at_root, own=[(0, root)])
    outgoing = {rank: send_buffer(part) for rank, part in enumerate(at_root)}
    buffer = receive_buffer(tensor)
    call = call_of(f"scatter({name_of(tensor.dtype)}, root {root})")
    send_and_receive(group, outgoing, {root: buffer}, call, rooted=True)
    copy_back([tensor], [buffer])
