"""All-gather of different sizes: every rank receives the tensors of all ranks. `all_gather` takes equal chunks.

3 ranks, of lengths 1, 3 and 2:

    rank 0   a            parts of every rank   a | b b b | c c
    rank 1   b b b
    rank 2   c c

Rounds: 1. Each rank receives the bytes of all other ranks and sends its own p-1 times. On one node it writes its own
once, into shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.call import call_of
from unisono.collectives.checks import Checks, check_memory, check_parts
from unisono.collectives.group import Group
from unisono.collectives.payload import bytes_of, copy_back, name_of, nbytes_of, receive_buffer, send_buffer
from unisono.collectives.ready import carry_out
from unisono.collectives.staged import is_on_device, on_host
from unisono.errors import TensorError
from unisono.transports.fused import staged_all_gather
from unisono.transports.messages import Parcel


def all_gather_v(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill parts[r] with the `tensor` of rank r, on every rank. All ranks must know all lengths. Any shape and stride.

    Raises TensorError unless there is one part per rank, all of the tensor's dtype, and this rank's own part is as
    long as the tensor. Raises MismatchError on every rank when ranks disagree about the lengths.
    """
    if is_on_device(tensor, *parts):
        on_host(group, "all_gather_v", (tensor, *parts), parts, lambda shard, *outs: all_gather_v(group, shard, outs))
        return
    with Checks(group, "all_gather_v"):
        check_gather(group, tensor, parts)
    lengths = ", ".join(str(part.numel()) for part in parts)
    call = call_of(f"all_gather_v({lengths} x {name_of(tensor.dtype)})")
    buffers = [receive_buffer(part) for part in parts]
    contents = [bytes_of(buffer) for buffer in buffers]
    content = send_buffer(tensor)
    if content.data_ptr() != buffers[group.rank].data_ptr():
        contents[group.rank][:] = bytes_of(content)
    if group.size > 1 and group.uses_shared_memory(call):
        parts_at = [(content.ctypes.data, len(content)) for content in contents]
        carry_out(group, staged_all_gather(group.memory_for(call), call, parts_at))
    else:
        with group.enter_call(call) as fingerprint:
            peers = [rank for rank in range(group.size) if rank != group.rank]
            sends = (Parcel(rank, contents[group.rank]) for rank in peers)
            group.deliver(sends, (Parcel(rank, contents[rank]) for rank in peers), call, fingerprint)
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
