"""part_broadcast, by PCL-DNN's name (section 3.4): each rank's own chunk goes to all (all-gather)."""

from __future__ import annotations

import torch

from unisono.collectives.checks import Checks, check_chunk, check_output
from unisono.collectives.group import Group
from unisono.collectives.payload import carrier_of, flat_of, nbytes_of, room_for, settle
from unisono.collectives.prepare import prepare
from unisono.errors import TensorError
from unisono.schedules.pieces import bounds
from unisono.wires import wire_of


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
        nbytes_of(out)
        plan = group.plan("part_broadcast", algorithm, out, wire, op=None, carrier=carrier)
    room = room_for(out)
    flat, part = room.detach().view(-1).view(carrier), flat_of(shard).view(carrier)
    if part.data_ptr() != flat[start:stop].data_ptr():
        flat[start:stop].copy_(part)
    if group.size > 1:
        group.start(prepare(group, plan), flat[start:stop], flat)
    settle([out], [room])
    return out
