"""All-to-all: every rank sends each other rank a different part. Gather and scatter are parts of it, to a root and from
it.

3 ranks; ab is the part that rank a has for rank b:

    rank 0   00 01 02         00 10 20
    rank 1   10 11 12   ──▶   01 11 21
    rank 2   20 21 22         02 12 22

Equal parts: 1 round of the schedule `direct`; n(p-1)/p bytes sent by each rank. Short ones between nodes are handed on
in few messages (`circulant`).

`all_to_all_v` takes parts of any length; ab is as long as rank a and rank b have agreed:

              sends       receives          lengths, for example
    rank 0    00 01 02    00 10 20          rank 0 sends 5 elements to rank 2: its sends[2] has 5,
    rank 1    10 11 12    01 11 21          and rank 2's receives[0] has 5
    rank 2    20 21 22    02 12 22

Rounds: 1. Bytes sent by each rank: its parts for the others, once. Within one node they go through shared memory
(`transports/fused.py`), between nodes as messages in pieces (`transports/messages.py`). Rank r begins with rank r+1,
so that no rank is the first destination of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import starmap

import numpy as np
import torch

from unisono.call import Call, call_of
from unisono.collectives.checks import Checks, check_memory, check_parts, check_root, check_tensors
from unisono.collectives.group import Group
from unisono.collectives.payload import bytes_of, copy_back, name_of, nbytes_of, receive_buffer, send_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import carry_out, start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host
from unisono.errors import MismatchError, TensorError
from unisono.transports import fused
from unisono.transports.messages import Parcel, size_mismatch


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
        plan = group.plan("all_to_all", algorithm, tensor, op=None)
    content, buffer = send_buffer(tensor), receive_buffer(result)
    if group.size == 1:
        bytes_of(buffer)[:] = bytes_of(content)
    else:
        play = prepare(group, plan)(content.data_ptr(), buffer.data_ptr())
        start_and_keep(group, parameters, play, content, buffer, checked_anywhere=out is None)
    copy_back([result], [buffer])
    return result


def all_to_all_v(group: Group, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
    """Send sends[d] to rank d, and fill receives[s] with the tensor from rank s. One dtype, any shape and stride.

    On rank r, sends[r] and receives[r] may be the same memory. Raises TensorError unless both lists hold one tensor per
    rank, all of one dtype, and where other tensors share memory. Raises MismatchError on every rank, naming both
    lengths, when a rank sends another length than the receiver expects.
    """
    check_tensors(group, "all_to_all_v", *sends, *receives)
    if is_on_device(*sends, *receives):
        both, ends = (*sends, *receives), len(sends)
        on_host(group, "all_to_all_v", both, receives, lambda *given: all_to_all_v(group, given[:ends], given[ends:]))
        return
    dtype = receives[0].dtype if receives else torch.uint8
    with Checks(group, "all_to_all_v"):
        check_parts(group, sends, dtype, "all_to_all_v")
        check_parts(group, receives, dtype, "all_to_all_v")
        check_memory(group, "all_to_all_v", receives, sends, in_place=[(group.rank, group.rank)])
    outgoing = {rank: send_buffer(part) for rank, part in enumerate(sends)}
    buffers = [receive_buffer(part) for part in receives]
    send_and_receive(group, outgoing, dict(enumerate(buffers)), call_of(f"all_to_all_v({name_of(dtype)})"))
    copy_back(receives, buffers)


def send_and_receive(
    group: Group,
    sends: Mapping[int, torch.Tensor],
    receives: Mapping[int, torch.Tensor],
    call: Call,
    rooted: bool = False,
) -> None:
    """Send plain tensors to some ranks and receive into others from some. Every send needs a receive on its target.

    In a `rooted` call not all ranks exchange data, so a mismatch might go unnoticed: the ranks compare calls first.
    """
    sent = {rank: bytes_of(part) for rank, part in sends.items()}
    expected = {rank: bytes_of(part) for rank, part in receives.items()}
    nothing = np.empty(0, np.uint8)
    if (memory := group.shared_memory(call)) is not None:
        ranks = range(group.size)
        outgoing, incoming = ([parts.get(rank, nothing) for rank in ranks] for parts in (sent, expected))
        carry_out(group, partial(fused.all_to_all_v, memory, call, outgoing, incoming))
        return
    with group.enter_call(call) as fingerprint:
        if rooted:
            group.check_same_call(call)
        own_sent, own_received = sent.pop(group.rank, nothing), expected.pop(group.rank, nothing)
        if (length := len(own_sent)) != len(own_received):
            rank = group.ranks[group.rank]
            raise MismatchError(size_mismatch(call.description, rank, rank, length, len(own_received)))
        own_received[:] = own_sent
        group.deliver(starmap(Parcel, sent.items()), starmap(Parcel, expected.items()), call, fingerprint)


def gather(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """Fill parts[r] on the root with the `tensor` of rank r. Only the root reads `parts`. Any shape and stride.
    The root's own part may be its `tensor`.

    Raises UsageError for a root that is not a rank, TensorError unless there is one part per rank, all of the tensor's
    dtype, and MismatchError on every rank, naming both lengths, when a part does not fit the tensor sent to it.
    """
    at_root = (parts or ()) if group.rank == root else ()
    with Checks(group, "gather"):
        _check_rooted(group, "gather", tensor, at_root, root)
        check_memory(group, "gather", at_root, [tensor], in_place=[(root, 0)])
    buffers = [receive_buffer(part) for part in at_root]
    call = call_of(f"gather({name_of(tensor.dtype)}, root {root})")
    send_and_receive(group, {root: send_buffer(tensor)}, dict(enumerate(buffers)), call, rooted=True)
    copy_back(at_root, buffers)


def scatter(group: Group, tensor: torch.Tensor, parts: Sequence[torch.Tensor] | None, root: int) -> None:
    """Fill the `tensor` of rank r with the root's parts[r]. Only the root reads `parts`. Any shape and stride.
    The root's `tensor` may be its own part. Errors are those of `gather`.
    """
    at_root = (parts or ()) if group.rank == root else ()
    with Checks(group, "scatter"):
        _check_rooted(group, "scatter", tensor, at_root, root)
        check_memory(group, "scatter", [tensor], at_root, in_place=[(0, root)])
    outgoing = {rank: send_buffer(part) for rank, part in enumerate(at_root)}
    buffer = receive_buffer(tensor)
    call = call_of(f"scatter({name_of(tensor.dtype)}, root {root})")
    send_and_receive(group, outgoing, {root: buffer}, call, rooted=True)
    copy_back([tensor], [buffer])


def _check_rooted(
    group: Group, collective: str, tensor: torch.Tensor, at_root: Sequence[torch.Tensor], root: int
) -> None:
    nbytes_of(tensor)
    check_root(group, root, collective)
    if group.rank == root:
        check_parts(group, at_root, tensor.dtype, collective)
