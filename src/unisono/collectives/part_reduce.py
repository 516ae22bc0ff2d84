"""part_reduce, by PCL-DNN's name (section 3.4): each rank ends with its own chunk of the sum (reduce-scatter)."""

from __future__ import annotations

import torch

from unisono.collectives.group import Group
from unisono.collectives.library import numbers_of, restore
from unisono.collectives.payload import memory_of, nbytes_of
from unisono.collectives.plans import Plan
from unisono.errors import TensorError
from unisono.schedules.pieces import bounds


def part_reduce(
    group: Group,
    tensor: torch.Tensor,
    algorithm: str = "auto",
    wire: str | None = None,
    op: str = "sum",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks and return this rank's chunk of the result, flat (reduce-scatter; PCL-DNN 3.4).

    Rank r gets elements [n r // p, n (r+1) // p) of the flattened result, in `out` where one is given: contiguous, of
    that length and the tensor's dtype. `tensor` stays as it is. `algorithm`, `wire`, `op` and what is raised are those
    of the allreduce; TensorError too for an `out` that does not fit.
    """
    plan = group.plan("part_reduce", algorithm, tensor.dtype, nbytes_of(tensor), wire, op)
    flat = tensor.detach().contiguous().view(-1)
    start, stop = bounds(flat.numel(), group.size, group.rank)
    shard = _shard(group, flat, stop - start, out)
    if group.size == 1:
        shard.copy_(flat)
    elif plan.choice.transport == "windows":
        view, itemsize = plan.arithmetic.view, tensor.dtype.itemsize
        memory = group.node_memory
        memory.staging.part_reduce(view(memory_of(flat)), view(memory_of(shard)), itemsize, plan.arithmetic, plan.what)
    elif plan.choice.algorithm == "library":
        _by_library(group, flat, shard, op, plan)
    else:
        algorithm_ = group.find(plan.choice.algorithm).part_reduce
        assert algorithm_ is not None, "the plan offers what the schedule has"
        whole = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat  # what is not the own chunk is lost
        with group.call(plan.what) as number:
            group.play(algorithm_, whole, number, plan, chunk_major=True)
        shard.copy_(whole[start:stop])
    return shard if out is None else out


def _shard(group: Group, flat: torch.Tensor, length: int, out: torch.Tensor | None) -> torch.Tensor:
    """Where the chunk goes, flat."""
    if out is None:
        return torch.empty(length, dtype=flat.dtype)
    if out.numel() != length or out.dtype != flat.dtype or not out.is_contiguous() or not out.is_cpu:
        raise TensorError(
            f"rank {group.rank}: out, {out.numel()} x {out.dtype} of strides {out.stride()} on {out.device}, cannot "
            f"take this rank's chunk; make it contiguous, {length} x {flat.dtype}, on the CPU"
        )
    return out.detach().view(-1)


def _by_library(group: Group, flat: torch.Tensor, shard: torch.Tensor, op: str, plan: Plan) -> None:
    """What MPI itself does."""
    numbers, kind, reduction = numbers_of(flat, op)
    counts = [stop - start for start, stop in (bounds(flat.numel(), group.size, r) for r in range(group.size))]
    part = shard if shard.dtype is numbers.dtype else torch.empty(len(shard), dtype=numbers.dtype)
    with group.library_call(plan.what):
        group.comm.Reduce_scatter(
            [memory_of(numbers), numbers.numel(), kind], [memory_of(part), part.numel(), kind], counts, reduction
        )
    restore(part, shard)
