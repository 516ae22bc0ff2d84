"""part_broadcast, by PCL-DNN's name (section 3.4): each rank's own chunk goes to all (all-gather)."""

from __future__ import annotations

import torch

from unisono.collectives.checks import Checks, check_chunk, check_output
from unisono.collectives.group import Group
from unisono.collectives.payload import MPI_TYPES, bytes_of, carrier_of, flat_of, memory_of, nbytes_of, room_for, settle
from unisono.collectives.plans import Plan
from unisono.errors import TensorError
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds
from unisono.transports.wires import wire_of


def part_broadcast(
    group: Group, shard: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", wire: str | None = None
) -> torch.Tensor:
    """Gather every rank's `shard` into everyone's `out`, and return it (all-gather; PCL-DNN 3.4).

    `shard` has the elements that `part_reduce` of a tensor like `out` would give this rank, and may lie where they
    belong in `out`. Any dtype: nothing is reduced. Raises TensorError for a shard that does not fit `out`.
    """
    start, stop = bounds(out.numel(), group.size, group.rank)
    with Checks(group, "part_broadcast"):
        if shard.numel() != stop - start or shard.dtype != out.dtype:
            raise TensorError(
                f"rank {group.rank}: a shard of {shard.numel()} x {shard.dtype} does not fit out, {out.numel()} x "
                f"{out.dtype} over {group.size} ranks; this rank's shard has {stop - start} elements"
            )
        check_output(group, out, "part_broadcast")
        check_chunk(group, "part_broadcast", shard, out, start)
        nbytes_of(shard)
        carrier = carrier_of(out) if wire_of(wire, out.dtype) is None else out.dtype
        plan = group.plan("part_broadcast", algorithm, out.dtype, nbytes_of(out), wire, carrier=carrier)
    room = room_for(out)
    flat, part = room.detach().view(-1).view(carrier), flat_of(shard).view(carrier)
    ends = [bounds(len(flat), group.size, rank) for rank in range(group.size)]
    if part.data_ptr() != flat[start:stop].data_ptr():
        flat[start:stop].copy_(part)
    if group.size > 1:
        _give(group, flat, ends, plan)
    settle([out], [room])
    return out


def _give(group: Group, flat: torch.Tensor, ends: list[tuple[int, int]], plan: Plan) -> None:
    """Fill `flat`, which has this rank's own chunk; each rank's is from its first end to its second."""
    if plan.choice.transport == "windows":
        chunks = [bytes_of(flat[start:stop]) for start, stop in ends]
        group.node_memory.passing.share(chunks, plan.what)
    elif plan.choice.algorithm == "library":
        counts, starts = [stop - start for start, stop in ends], [start for start, _ in ends]
        with group.library_call(plan.what):
            group.comm.Allgatherv(MPI.IN_PLACE, [memory_of(flat), counts, starts, MPI_TYPES[flat.dtype]])
    else:
        schedule = group.find(plan.choice.algorithm).part_broadcast
        assert schedule is not None, "the plan offers what the schedule has"
        with group.call(plan.what) as number:
            group.play(schedule, flat, number, plan, chunk_major=True)
