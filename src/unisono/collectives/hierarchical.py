"""Allreduce in levels (DIMD section 4.2): in the node through shared memory, between nodes by any schedule, and back.

2 nodes of 2 ranks; the payload in 2 columns, A and B:

    node 0   rank 0  A B  ─┐ sum within    A'    ─── between ───  A''   ─┐ back within   A'' B''
             rank 1  A B  ─┘ the node         B'   ─┐  nodes         B'' ─┘ the node     A'' B''
    node 1   rank 2  A B  ─┐               A'    ───┼───────────  A''   ─┐               A'' B''
             rank 3  A B  ─┘                  B'   ─┘                B'' ─┘              A'' B''

Each rank takes one column between the nodes, so the work is shared; a node's link carries 2n(N-1)/N bytes, whatever the
number of ranks on it. A short payload goes as one column: fewer messages. `schedules/hierarchical.py` is this as data.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import bytes_of, memory_of
from unisono.collectives.plans import Plan
from unisono.schedules.pieces import bounds

SHORT = 64 << 10
"""Bytes of a column below which one rank of a node speaks for all."""


def allreduce_in_levels(
    group: Group, tensor: torch.Tensor, plan: Plan, between: Callable[[Group, torch.Tensor], None]
) -> None:
    """Reduce a contiguous tensor in place; `between` reduces one over the ranks of a column."""
    arithmetic, itemsize = plan.arithmetic, tensor.dtype.itemsize
    with group.call(plan.what):
        node, column = group.levels(plan.what)
        owners = group.columns if tensor.nbytes > SHORT * group.columns else 1
        memory = node.node_memory if node.size > 1 else None
        flat = tensor.detach().view(-1)
        chunks = [
            flat[slice(*bounds(len(flat), owners, rank))] if rank < owners else flat[:0] for rank in range(node.size)
        ]
        own = chunks[node.rank]
        if memory is not None:
            memory.staging.part_reduce(arithmetic.view(memory_of(flat)), None, itemsize, arithmetic, plan.what, owners)
        if column is not None and column.size > 1 and len(own):
            between(column, own)
        if memory is not None:
            memory.passing.share([bytes_of(chunk) for chunk in chunks], plan.what)
