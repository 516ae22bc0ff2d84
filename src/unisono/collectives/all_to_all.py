"""All-to-all: every rank sends each other rank a different chunk.

3 ranks; ab is the chunk that rank a has for rank b:

    rank 0   00 01 02         00 10 20
    rank 1   10 11 12   ──▶   01 11 21
    rank 2   20 21 22         02 12 22

Rounds: 1 of the schedule `direct`. Bytes sent by each rank: n(p-1)/p. Short chunks between nodes are handed on in few
messages (`circulant`). `all_to_all_v` takes parts of different sizes.
"""

from __future__ import annotations

import torch

from unisono.collectives.checks import Checks, check_memory, check_tensors
from unisono.collectives.group import Group
from unisono.collectives.payload import bytes_of, copy_back, nbytes_of, receive_buffer, send_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host
from unisono.errors import TensorError


def all_to_all(
    group: Group, tensor: torch.Tensor, algorithm: str = "auto", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Send chunk d of `tensor` to rank d; return the received chunks in `out` or a new tensor, as `World.all_to_all`.

    `out` has the same dtype and number of elements as `tensor`, and shares no memory with it. Raises TensorError if it
    does not fit.
    """
    if not isinstance(tensor, torch.Tensor):
        check_tensors(group, "all_to_all", tensor)
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
    parameters = "all_to_all", algorithm, out is None
    if start_ready(group, parameters, tensor, result):
        return result
    if is_on_device(tensor):
        both = tensor, result
        on_host(group, "all_to_all", both, (result,), lambda sent, into: all_to_all(group, sent, algorithm, into))
        return result
    with Checks(group, "all_to_all"):
        nbytes = nbytes_of(tensor)
        if tensor.numel() % group.size:
            raise TensorError(
                f"rank {group.rank}: all_to_all of {tensor.numel()} elements, not divisible by {group.size} ranks"
            )
        if nbytes_of(result) != nbytes or result.dtype != tensor.dtype:
            raise TensorError(
                f"rank {group.rank}: out, {result.numel()} x {result.dtype}, does not fit {tensor.numel()} x "
                f"{tensor.dtype}"
            )
        check_memory(group, "all_to_all", [result], [tensor])
        plan = group.plan("all_to_all", algorithm, tensor, op=None, move_dtype=torch.uint8)
    content, buffer = send_buffer(tensor), receive_buffer(result)
    if group.size == 1:
        bytes_of(buffer)[:] = bytes_of(content)
    else:
        play = prepare(group, plan)(content.data_ptr(), buffer.data_ptr())
        start_and_keep(group, parameters, play, content, buffer, checked_anywhere=out is None)
    copy_back([result], [buffer])
    return result
