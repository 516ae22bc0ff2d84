"""All-gather: every rank receives the chunks of all ranks. PCL-DNN (section 3.4) calls it part_broadcast.

4 ranks, each with a chunk of its own:

    rank 0   A                A B C D
    rank 1     B       ──▶    A B C D
    rank 2       C            A B C D
    rank 3         D          A B C D

Bytes sent by each rank: at least n(p-1)/p. The schedule determines the number of rounds. `all_gather_v` takes chunks of
different sizes.
"""

from __future__ import annotations

from functools import partial

import torch

from unisono.collectives.checks import Checks, check_chunk, check_output
from unisono.collectives.group import Group
from unisono.collectives.payload import copy_back, flat_of, move_dtype_of, nbytes_of, receive_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host
from unisono.errors import TensorError
from unisono.schedules.pieces import bounds
from unisono.transports.plan import bytes_at
from unisono.wires import wire_of


def all_gather(
    group: Group, shard: torch.Tensor, out: torch.Tensor, algorithm: str = "auto", wire: str | None = None
) -> torch.Tensor:
    """Gather the `shard` of every rank, which may be that part of `out` itself, into `out`, as `World.all_gather`."""
    parameters = "all_gather", algorithm, wire
    if start_ready(group, parameters, shard, out):
        return out
    if is_on_device(shard, out):
        on_host(group, "all_gather", (shard, out), (out,), partial(all_gather, group, algorithm=algorithm, wire=wire))
        return out
    start, stop = bounds(out.numel(), group.size, group.rank)
    with Checks(group, "all_gather"):
        if shard.numel() != stop - start or shard.dtype != out.dtype:
            raise TensorError(
                f"rank {group.rank}: a shard of {shard.numel()} x {shard.dtype} does not fit out, {out.numel()} x "
                f"{out.dtype} over {group.size} ranks; this rank's shard has {stop - start} elements"
            )
        check_output(group, out, "all_gather")
        check_chunk(group, "all_gather", shard, out, start)
        nbytes_of(shard)
        move_dtype = move_dtype_of(out) if wire_of(wire, out.dtype) is None else out.dtype
        nbytes_of(out)
        plan = group.plan("all_gather", algorithm, out, wire, op=None, move_dtype=move_dtype)
    buffer = receive_buffer(out)
    part, nbytes = flat_of(shard), shard.nbytes
    source, target, place = part.data_ptr(), buffer.data_ptr(), buffer.data_ptr() + start * out.dtype.itemsize
    gather = prepare(group, plan)(place, target) if group.size > 1 else None
    given, chunk = bytes_at(source, nbytes), bytes_at(place, nbytes)

    def play() -> None:
        if source != place:
            chunk[:] = given
        if gather is not None:
            gather()

    start_and_keep(group, parameters, play, part, buffer)
    copy_back([out], [buffer])
    return out
