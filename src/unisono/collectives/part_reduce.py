"""part_reduce, by PCL-DNN's name (section 3.4): each rank ends with its own chunk of the sum (reduce-scatter)."""

from __future__ import annotations

import torch

from unisono.collectives.checks import Checks, check_chunk, check_output
from unisono.collectives.group import Group
from unisono.collectives.library import numbers_of, restore
from unisono.collectives.overlap import is_chunk, shared
from unisono.collectives.payload import flat_of, memory_of, name_of, nbytes_of, room_for, settle
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

    Rank r gets elements [n r // p, n (r+1) // p) of the flattened result, in `out` where one is given: as many, of the
    tensor's dtype. `tensor` stays as it is, but for `out` where that is this rank's chunk of it. `algorithm`, `wire`,
    `op` and what is raised are those of the allreduce; TensorError too for an `out` that does not fit.
    """
    start, stop = bounds(tensor.numel(), group.size, group.rank)
    with Checks(group, "part_reduce"):
        plan = group.plan("part_reduce", algorithm, tensor.dtype, nbytes_of(tensor), wire, op)
        if out is not None:
            _check_out(group, tensor, out, start, stop)
    flat = flat_of(tensor)
    room = torch.empty(stop - start, dtype=tensor.dtype) if out is None else room_for(out)
    _carry_out(group, tensor, flat, room.detach().view(-1), op, plan)
    if out is None:
        return room
    settle([out], [room])
    return out


def _check_out(group: Group, tensor: torch.Tensor, out: torch.Tensor, start: int, stop: int) -> None:
    """Raise TensorError for an `out` that cannot take this rank's chunk."""
    if out.numel() != stop - start or out.dtype != tensor.dtype or not out.is_cpu:
        raise TensorError(
            f"rank {group.rank}: out, {out.numel()} x {name_of(out.dtype)} on {out.device}, cannot take this rank's "
            f"chunk; make it {stop - start} x {name_of(tensor.dtype)}, on the CPU"
        )
    check_output(group, out, "part_reduce")
    check_chunk(group, "part_reduce", out, tensor, start)


def _carry_out(
    group: Group, tensor: torch.Tensor, flat: torch.Tensor, shard: torch.Tensor, op: str, plan: Plan
) -> None:
    """Reduce `flat`, the elements of `tensor`, and put this rank's chunk into `shard`, which may be that chunk."""
    start, stop = bounds(flat.numel(), group.size, group.rank)
    if group.size == 1:
        shard.copy_(flat)
    elif plan.choice.transport == "windows":
        view, itemsize = plan.arithmetic.view, tensor.dtype.itemsize
        staging = group.node_memory.staging
        into = None if is_chunk(shard, flat, start) else view(memory_of(shard))
        staging.part_reduce(view(memory_of(flat)), into, itemsize, plan.arithmetic, plan.what)
    elif plan.choice.algorithm == "library":
        _by_library(group, flat, shard, op, plan)
    else:
        algorithm_ = group.find(plan.choice.algorithm).part_reduce
        assert algorithm_ is not None, "the plan offers what the schedule has"
        whole = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat  # what is not the own chunk is lost
        with group.call(plan.what) as number:
            group.play(algorithm_, whole, number, plan, chunk_major=True)
        shard.copy_(whole[start:stop])


def _by_library(group: Group, flat: torch.Tensor, shard: torch.Tensor, op: str, plan: Plan) -> None:
    """What MPI itself does."""
    numbers, kind, reduction = numbers_of(flat, op)
    counts = [stop - start for start, stop in (bounds(flat.numel(), group.size, r) for r in range(group.size))]
    fit = shard.dtype is numbers.dtype and not shared(shard, numbers)  # MPI takes no memory that is both
    part = shard if fit else torch.empty(len(shard), dtype=numbers.dtype)
    with group.library_call(plan.what):
        group.comm.Reduce_scatter(
            [memory_of(numbers), numbers.numel(), kind], [memory_of(part), part.numel(), kind], counts, reduction
        )
    restore(part, shard)
