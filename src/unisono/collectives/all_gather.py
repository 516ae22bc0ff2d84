"""All-gather: every rank receives the chunks of all ranks. PCL-DNN (section 3.4) calls it part_broadcast.

4 ranks, each with a chunk of its own:

    rank 0   A                A B C D
    rank 1     B       ──▶    A B C D
    rank 2       C            A B C D
    rank 3         D          A B C D

Bytes sent by each rank: at least n(p-1)/p. The schedule determines the number of rounds.

`all_gather_v` takes tensors of different sizes. 3 ranks, of lengths 1, 3 and 2:

    rank 0   a            parts of every rank   a | b b b | c c
    rank 1   b b b
    rank 2   c c

Rounds: 1. Each rank receives the bytes of all other ranks and sends its own p-1 times. On one node it writes its own
once, into shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from unisono.call import call_of
from unisono.collectives.all_to_all import send_and_receive
from unisono.collectives.checks import Checks, check_chunk, check_memory, check_output, check_parts, check_tensors
from unisono.collectives.group import Group
from unisono.collectives.payload import bytes_of, copy_back, flat_of, name_of, nbytes_of, receive_buffer, send_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import carry_out, start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host
from unisono.errors import TensorError
from unisono.schedules.pieces import bounds
from unisono.transports.fused import staged_all_gather
from unisono.transports.plan import bytes_at
from unisono.wires import EXACT


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
    wire = None if wire == EXACT else wire  # nothing is summed: chunks are those of ranks, not of whole blocks
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
        nbytes_of(out)
        plan = group.plan("all_gather", algorithm, out, wire, op=None)
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


def all_gather_v(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill parts[r] with the `tensor` of rank r, on every rank. All ranks must know all lengths. Any shape and stride.

    Raises TensorError unless there is one part per rank, all of the tensor's dtype, and this rank's own part is as
    long as the tensor. Raises MismatchError on every rank when ranks disagree about the lengths.
    """
    check_tensors(group, "all_gather_v", tensor, *parts)
    if is_on_device(tensor, *parts):
        on_host(group, "all_gather_v", (tensor, *parts), parts, lambda shard, *outs: all_gather_v(group, shard, outs))
        return
    with Checks(group, "all_gather_v"):
        check_gather(group, tensor, parts)
    lengths = ", ".join(str(part.numel()) for part in parts)
    call = call_of(f"all_gather_v({lengths} x {name_of(tensor.dtype)})")
    content, buffers = send_buffer(tensor), [receive_buffer(part) for part in parts]
    if (memory := group.shared_memory(call)) is not None:
        if content.data_ptr() != buffers[group.rank].data_ptr():
            bytes_of(buffers[group.rank])[:] = bytes_of(content)
        parts_at = [(buffer.data_ptr(), buffer.nbytes) for buffer in buffers]
        carry_out(group, staged_all_gather(memory, call, parts_at))
    else:
        send_and_receive(group, dict.fromkeys(range(group.size), content), dict(enumerate(buffers)), call)
    copy_back(parts, buffers)


def check_gather(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Raise TensorError for parts that do not fit the ranks' tensors. The own part may be `tensor` itself."""
    nbytes_of(tensor)
    check_parts(group, parts, tensor.dtype, "all_gather_v")
    if parts[group.rank].numel() != tensor.numel():
        raise TensorError(
            f"rank {group.rank}: all_gather_v of {tensor.numel()} elements with an own part of "
            f"{parts[group.rank].numel()}; make them equally long"
        )
    check_memory(group, "all_gather_v", parts, [tensor], in_place=[(group.rank, 0)])
