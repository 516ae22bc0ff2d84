"""Allreduce: every rank ends with the sum, or another reduction, of all ranks' tensors.

4 ranks:

    rank 0   1         10
    rank 1   2   ──▶   10
    rank 2   3         10
    rank 3   4         10

The schedule determines rounds and bytes (`unisono draw` shows them). For n bytes on p ranks, each rank sends at least
2n(p-1)/p bytes.
"""

from __future__ import annotations

from functools import partial

import torch

from unisono.collectives.checks import Checks, check_output
from unisono.collectives.direct import allreduce_direct, is_direct, reaches
from unisono.collectives.group import Group
from unisono.collectives.payload import is_plain, nbytes_of, send_buffer
from unisono.collectives.plans import AUTO
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import Key, keep_ready
from unisono.collectives.staged import allreduce_staged, is_on_device, refuse_shared, refuse_unsupported
from unisono.transports.plan import Play

MAX_FLAT_SHARED_BYTES = 4 << 10
"""Largest payload in shared memory, in bytes, that is copied and reduced whole by each rank, with one barrier."""


def allreduce(
    group: Group, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
) -> torch.Tensor:
    """Reduce `tensor` over all ranks in place, and return it, as `World.allreduce`.

    Block-scaled integers go by schedules that cut a payload alike in all rounds ("direct", "ring"). Shared memory and
    the library carry tensors unencoded.
    """
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no memory, as a sparse tensor; the checks name what it is
        address = 0
    key = address, tensor.numel(), tensor.dtype, algorithm, wire, op
    play = group.ready.get(key)
    if play is None or not tensor.is_contiguous() or tensor.is_neg():
        play = _prepare_first(group, key, tensor, algorithm, wire, op)
    try:
        play()
    except BaseException:  # other ranks may still write into the tensor, whatever has ended the wait here
        group.keep_alive_if_pending(tensor)
        raise
    return tensor


def _prepare_first(group: Group, key: Key, tensor: torch.Tensor, algorithm: str, wire: str | None, op: str) -> Play:
    """Return the allreduce of a tensor of an address, a length or an algorithm that is not prepared yet."""
    if is_on_device(tensor):
        with Checks(group, "allreduce"):
            refuse_unsupported(tensor)
            refuse_shared("allreduce", [tensor])
        return partial(_allreduce_of_device, group, tensor, algorithm, wire, op) if group.size > 1 else lambda: None
    with Checks(group, "allreduce"):
        nbytes_of(tensor)
        planned = algorithm
        if algorithm == AUTO and group.is_reduced_in_place(tensor, wire):
            planned = "flat" if tensor.nbytes <= MAX_FLAT_SHARED_BYTES else "direct"
        plan = group.plan("allreduce", planned, tensor, wire, op)
        check_output(group, tensor, "allreduce")
    if group.size == 1:
        return lambda: None
    if not is_plain(tensor):
        return partial(_reduce_copy, group, tensor, algorithm, wire, op)
    address = tensor.data_ptr()
    play = prepare(group, plan)(address, address)
    if address:
        if (found := group.find_shared(address, tensor.nbytes)) is not None:
            found[1].plan(group.ready)  # cleared with the memory: other memory may follow at its address
        keep_ready(group, key, play)
    return play


def _reduce_copy(group: Group, tensor: torch.Tensor, algorithm: str, wire: str | None, op: str) -> None:
    """Reduce a tensor whose memory is not contiguous, or that is a lazy negative, by a copy that is."""
    with torch.no_grad():
        tensor.copy_(allreduce(group, send_buffer(tensor), algorithm, wire, op))


def _allreduce_of_device(group: Group, tensor: torch.Tensor, algorithm: str, wire: str | None, op: str) -> None:
    if algorithm == AUTO and reaches_device(group, tensor.device) and is_direct(group, tensor, op, wire):
        allreduce_direct(group, tensor, op, wire)
    else:
        allreduce_staged(allreduce, group, tensor, algorithm, wire, op)


def reaches_device(group: Group, device: torch.device) -> bool:
    """Return True where MPI moves a device's memory, faster than by copies in host memory. Called by all ranks
    together: the first call tries."""

    def staged(tensor: torch.Tensor) -> None:
        allreduce_staged(allreduce, group, tensor, AUTO, None, "sum")

    return reaches(group, device, staged)
