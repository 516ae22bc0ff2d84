"""Gather: what each rank has goes to the root.

3 ranks, root 0; of lengths 1, 2 and 1:

    rank 0   a        parts of rank 0   a | b b | c
    rank 1   b b
    rank 2   c

Rounds: 1. The root receives all but its own bytes, and nobody can do with fewer; each other rank sends its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.call import call
from unisono.collectives.checks import Checks, check_memory, check_parts, check_root
from unisono.collectives.exchange import carry
from unisono.collectives.group import Group
from unisono.collectives.payload import content_of, name_of, nbytes_of, room_for, settle


def gather(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """Fill the root's parts[r] with rank r's `tensor`; `parts` is looked at on the root alone. Any shape and stride.
    The root's own part may be its `tensor`.

    Raises UsageError for a root that is no rank, TensorError for parts that are not one for each rank of the tensor's
    dtype, MismatchError when a part has another length than what comes: naming both, on every rank.
    """
    at_root = (parts or ()) if group.rank == root else ()
    with Checks(group, "gather"):
        nbytes_of(tensor)
        check_root(group, root, "gather")
        if group.rank == root:
            check_parts(group, at_root, tensor.dtype, "gather")
            check_memory(group, "gather", at_root, [tensor], own=[(root, 0)])
    rooms = [room_for(part) for part in at_root]
    what = call(f"gather({name_of(tensor.dtype)}, root {root})")
    carry(group, {root: content_of(tensor)}, dict(enumerate(rooms)), what, rooted=True)
    settle(at_root, rooms)
