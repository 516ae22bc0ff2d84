"""part_reduce, by PCL-DNN's name (section 3.4): each rank ends with its own chunk of the sum (reduce-scatter)."""

from __future__ import annotations

import torch

from unisono.collectives.group import Group, Plan
from unisono.collectives.payload import MPI_TYPES, memory_of, nbytes_of
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import HALF_DTYPES


def part_reduce(group: Group, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None) -> torch.Tensor:
    """Sum `tensor` over all ranks and return this rank's chunk of the sum, flat (reduce-scatter; PCL-DNN 3.4).

    Rank r gets elements [n r // p, n (r+1) // p) of the flattened sum. `tensor` stays as it is.
    """
    plan = group.plan("part_reduce", algorithm, tensor.dtype, nbytes_of(tensor), wire)
    flat = tensor.detach().contiguous().view(-1)
    start, stop = bounds(flat.numel(), group.size, group.rank)
    if group.size == 1:
        return flat.clone()
    if plan.choice.transport == "windows":
        shard = torch.empty(stop - start, dtype=tensor.dtype)
        view, itemsize = plan.arithmetic.view, tensor.dtype.itemsize
        memory = group.node_memory
        memory.staging.part_reduce(view(memory_of(flat)), view(memory_of(shard)), itemsize, plan.arithmetic, plan.what)
        return shard
    if plan.choice.algorithm == "library":
        return _by_library(group, flat, plan)
    algorithm_ = group.find(plan.choice.algorithm).part_reduce
    assert algorithm_ is not None, "the plan offers what the schedule has"
    whole = flat.clone()
    with group.call(plan.what) as number:
        group.play(algorithm_, whole, number, plan.wire, chunk_major=True)
    return whole[start:stop].clone()


def _by_library(group: Group, flat: torch.Tensor, plan: Plan) -> torch.Tensor:
    """What MPI itself does; the half types, which it may not know, as float32."""
    exact = flat.float() if flat.dtype in HALF_DTYPES else flat
    counts = [stop - start for start, stop in (bounds(flat.numel(), group.size, r) for r in range(group.size))]
    shard = torch.empty(counts[group.rank], dtype=exact.dtype)
    kind = MPI_TYPES[exact.dtype]
    with group.library_call(plan.what):
        group.comm.Reduce_scatter(
            [memory_of(exact), exact.numel(), kind], [memory_of(shard), shard.numel(), kind], counts
        )
    return shard.to(flat.dtype)
