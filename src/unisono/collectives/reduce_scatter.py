"""Reduce-scatter: each rank ends with its own chunk of the reduction. PCL-DNN (section 3.4) calls it part_reduce.

4 ranks; a payload of 4 chunks, A to D; x' is the sum of all ranks' x:

    rank 0   A B C D          A'
    rank 1   A B C D   ──▶      B'
    rank 2   A B C D              C'
    rank 3   A B C D                D'

Bytes sent by each rank: at least n(p-1)/p. The schedule determines the number of rounds.
"""

from __future__ import annotations

from functools import partial

import torch

from unisono.collectives.allreduce import allreduce
from unisono.collectives.checks import Checks, check_chunk, check_output, check_tensors
from unisono.collectives.group import Group
from unisono.collectives.payload import copy_back, flat_of, name_of, nbytes_of, receive_buffer
from unisono.collectives.prepare import prepare
from unisono.collectives.ready import start_and_keep, start_ready
from unisono.collectives.staged import is_on_device, on_host
from unisono.errors import TensorError
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import arithmetic_of
from unisono.transports.exact import sum_over
from unisono.wires import EXACT


def reduce_scatter(
    group: Group,
    tensor: torch.Tensor,
    algorithm: str = "auto",
    wire: str | None = None,
    op: str = "sum",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce `tensor` over all ranks and return this rank's chunk of the result, flat, as `World.reduce_scatter`.

    The result is in `out` if given, which may be this rank's chunk of `tensor`. Raises TensorError if it does not fit.
    """
    if not isinstance(tensor, torch.Tensor):
        check_tensors(group, "reduce_scatter", tensor)
    start, stop = bounds(tensor.numel(), group.size, group.rank)
    result = torch.empty(stop - start, dtype=tensor.dtype, device=tensor.device) if out is None else out
    parameters = "reduce_scatter", algorithm, wire, op, out is None
    if start_ready(group, parameters, tensor, result):
        return result
    if is_on_device(tensor):
        call = partial(reduce_scatter, group, algorithm=algorithm, wire=wire, op=op)
        on_host(group, "reduce_scatter", (tensor, result), (result,), lambda source, target: call(source, out=target))
        return result
    if wire == EXACT and op == "sum" and tensor.is_floating_point():
        with Checks(group, "reduce_scatter"):
            _check_out(group, tensor, result, start, stop)
        total = sum_over(group, tensor, algorithm, allreduce, reduce_scatter)
        result.detach().copy_(total.view(result.shape))
        return result
    wire = None if wire == EXACT else wire
    with Checks(group, "reduce_scatter"):
        nbytes_of(tensor)
        arithmetic_of(tensor.dtype, op)  # raises for what cannot be reduced; a plan without an op moves its payload
        plan = group.plan("reduce_scatter", algorithm, tensor, wire, op)
        if out is not None:
            _check_out(group, tensor, out, start, stop)
    flat, buffer = flat_of(tensor), receive_buffer(result)
    if group.size == 1:
        buffer.detach().view(-1).copy_(flat)
    else:
        play = prepare(group, plan)(flat.data_ptr(), buffer.data_ptr())
        start_and_keep(group, parameters, play, flat, buffer, checked_anywhere=out is None)
    copy_back([result], [buffer])
    return result


def _check_out(group: Group, tensor: torch.Tensor, out: torch.Tensor, start: int, stop: int) -> None:
    if out.numel() != stop - start or out.dtype != tensor.dtype or out.device != tensor.device:
        raise TensorError(
            f"rank {group.rank}: out, {out.numel()} x {name_of(out.dtype)} on {out.device}, does not fit this rank's "
            f"chunk; make it {stop - start} x {name_of(tensor.dtype)}, on {tensor.device}"
        )
    check_output(group, out, "reduce_scatter")
    check_chunk(group, "reduce_scatter", out, tensor, start)
