"""part_broadcast, by PCL-DNN's name (section 3.4): each rank's own chunk goes to all (all-gather)."""

from __future__ import annotations

import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import MPI_TYPES, bytes_of, carrier_of, flat_of, memory_of, nbytes_of
from unisono.errors import TensorError
from unisono.schedules.pieces import bounds
from unisono.transports.wires import wire_of


def part_broadcast(
    group: Group, shard: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", wire: str | None = None
) -> torch.Tensor:
    """Gather every rank's `shard` into everyone's `out`, and return it (all-gather; PCL-DNN 3.4).

    `shard` has the elements that `part_reduce` of a tensor like `out` would give this rank. Any dtype: nothing is
    reduced. Raises TensorError for a shard that does not fit `out`.
    """
    start, stop = bounds(out.numel(), group.size, group.rank)
    if shard.numel() != stop - start or shard.dtype != out.dtype:
        raise TensorError(
            f"rank {group.rank}: a shard of {shard.numel()} x {shard.dtype} does not fit out, {out.numel()} x "
            f"{out.dtype} over {group.size} ranks; this rank's shard has {stop - start} elements"
        )
    carrier = carrier_of(out) if wire_of(wire, out.dtype) is None else out.dtype
    plan = group.plan("part_broadcast", algorithm, carrier, nbytes_of(out), wire, op=None)
    part = flat_of(shard).view(carrier)
    target = out.detach() if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    flat = target.view(-1).view(carrier)
    if group.size == 1:
        flat.copy_(part)
    elif plan.choice.transport == "windows":
        chunks = [flat[slice(*bounds(len(flat), group.size, rank))] for rank in range(group.size)]
        chunks[group.rank].copy_(part)
        group.node_memory.passing.share([bytes_of(chunk) for chunk in chunks], plan.what)
    elif plan.choice.algorithm == "library":
        ends = [bounds(flat.numel(), group.size, rank) for rank in range(group.size)]
        counts, starts = [stop - start for start, stop in ends], [start for start, _ in ends]
        kind = MPI_TYPES[carrier]
        with group.library_call(plan.what):
            group.comm.Allgatherv([memory_of(part), part.numel(), kind], [memory_of(flat), counts, starts, kind])
    else:
        flat[start:stop] = part
        algorithm_ = group.find(plan.choice.algorithm).part_broadcast
        assert algorithm_ is not None, "the plan offers what the schedule has"
        with group.call(plan.what) as number:
            group.play(algorithm_, flat, number, plan, chunk_major=True)
    if not out.is_contiguous():
        out.detach().copy_(target)
    return out
