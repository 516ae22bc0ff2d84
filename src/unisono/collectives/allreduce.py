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

import torch

from unisono.collectives.checks import Checks, check_output
from unisono.collectives.group import Group
from unisono.collectives.payload import is_plain, nbytes_of, send_buffer
from unisono.collectives.prepare import prepare

MAX_READY = 256
"""Largest number of prepared allreduces that are found without planning."""


def allreduce(
    group: Group, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
) -> torch.Tensor:
    """Reduce `tensor` over all ranks in place, and return it. Any shape and stride, the same on every rank.

    `algorithm` is "auto" (chosen by measurement, or else by predicted time), "library", or the name of a schedule.
    `wire` is the encoding of a schedule's messages: "float32", "float16", "bfloat16", "int8" or "int4"; None for the
    tensor's dtype. Block-scaled integers go by schedules that cut a payload alike in all rounds ("direct", "ring").
    Shared memory and the library carry tensors unencoded. `op` is "sum", "product", "minimum", "maximum", or for
    integers and bool "and", "or", "xor". Sums are made in float32 or wider. Every rank ends with the same bits.
    Raises TensorError for a dtype, a device or a wire that is not supported, UsageError for an unknown algorithm
    or op, MismatchError when ranks are in different calls.
    """
    ready = group.ready_allreduces.get((tensor.numel(), algorithm, wire, op))
    if ready is None or not (
        tensor.dtype is ready[0]
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
    ):
        with Checks(group, "allreduce"):
            nbytes_of(tensor)
            plan = group.plan("allreduce", algorithm, tensor, wire, op)
            check_output(group, tensor, "allreduce")
        if group.size == 1:
            return tensor
        if not is_plain(tensor):
            with torch.no_grad():
                return tensor.copy_(allreduce(group, send_buffer(tensor), algorithm, wire, op))
        if len(group.ready_allreduces) == MAX_READY:
            group.ready_allreduces.clear()
        ready = group.ready_allreduces[tensor.numel(), algorithm, wire, op] = tensor.dtype, prepare(group, plan)
    address = tensor.data_ptr()  # as Group.start, without a further call: a short one takes some 2 us in all
    try:
        ready[1](address, address)
    except BaseException:
        group.keep_alive_if_pending(tensor)
        raise
    return tensor
