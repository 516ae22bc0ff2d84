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

from unisono.call import call_of
from unisono.collectives.checks import Checks, check_output, check_tensors
from unisono.collectives.device_transports import Transports, backend_of, transports_of
from unisono.collectives.direct import allreduce_direct, is_direct
from unisono.collectives.group import Group
from unisono.collectives.payload import is_plain, nbytes_of, put_back, send_buffer
from unisono.collectives.prepare import AUTO, prepare
from unisono.collectives.ready import Key, start_and_keep
from unisono.collectives.socket_calls import MAX_FLAT_BYTES
from unisono.collectives.staged import allreduce_staged, is_on_device, refuse_shared, refuse_unsupported
from unisono.transports.arithmetic import arithmetic_of
from unisono.transports.exact import FORMATS, sum_over
from unisono.transports.plan import on_copies
from unisono.wires import EXACT

MAX_FLAT_SHARED_BYTES = 4 << 10
"""Largest payload in shared memory, in bytes, that is copied and reduced whole by each rank, with one barrier."""

MAX_EXACT_RANKS = 16
"""Largest number of ranks on several nodes that send each other chunks of an exact sum: 2(p-1) messages each."""


def allreduce(
    group: Group, tensor: torch.Tensor, algorithm: str = "auto", wire: str | None = None, op: str = "sum"
) -> torch.Tensor:
    """Reduce `tensor` over all ranks in place, and return it, as `World.allreduce`.

    Block-scaled integers go by schedules that cut a payload alike in all rounds ("direct", "ring"). Shared memory and
    the library carry tensors unencoded.
    """
    parameters = "allreduce", algorithm, wire, op
    try:
        ready = group.ready.play(parameters, tensor)
    except BaseException:  # whatever has ended the wait here
        group.interrupt(tensor)
        raise
    if not ready:
        _start_first(group, parameters, tensor, algorithm, wire, op)
    return tensor


def _start_first(
    group: Group, parameters: Key, tensor: torch.Tensor, algorithm: str, wire: str | None, op: str
) -> None:
    """Carry the allreduce out of a tensor of an address, a length or an algorithm that is not prepared yet."""
    check_tensors(group, "allreduce", tensor)
    if wire == EXACT and (op != "sum" or not tensor.is_floating_point()):
        wire = None  # integers need no other form
    if is_on_device(tensor):
        with Checks(group, "allreduce"):
            refuse_unsupported(tensor)
            refuse_shared("allreduce", [tensor])
        if wire == EXACT:  # one rank rounds, too; pieces are whole blocks
            allreduce_staged(allreduce, group, tensor, algorithm, wire, op)
        elif group.size > 1:
            _allreduce_of_device(group, tensor, algorithm, wire, op)
        return
    if wire == EXACT and not (algorithm == AUTO and _sums_what_it_sees(group, tensor)):
        with Checks(group, "allreduce"):
            nbytes_of(tensor)
            check_output(group, tensor, "allreduce")
            group.plans.choose("allreduce", algorithm, tensor.nbytes)  # raises before the tensor has integers
        with torch.no_grad():
            put_back(tensor, sum_over(group, tensor, algorithm, allreduce))
        return
    with Checks(group, "allreduce"):
        nbytes_of(tensor)
        arithmetic_of(tensor.dtype, op)  # raises for what cannot be reduced; a plan without an op moves its payload
        planned = algorithm
        if wire == EXACT or (algorithm == AUTO and wire is None and _is_reduced_in_place(group, tensor)):
            most = MAX_FLAT_SHARED_BYTES if group.one_node else MAX_FLAT_BYTES * (group.size == 2)  # two send once each
            planned = "flat" if tensor.nbytes <= most else "direct"
        plan = group.plan("allreduce", planned, tensor, wire, op)
        check_output(group, tensor, "allreduce")
    if group.size == 1:
        return
    if not is_plain(tensor):
        with torch.no_grad():
            tensor.copy_(allreduce(group, send_buffer(tensor), algorithm, wire, op))
        return
    address = tensor.data_ptr()
    prepared, anywhere = prepare(group, plan), None
    if address and (shared := group.find_shared(address, tensor.nbytes)) is not None:
        shared[1].on_drop.add(group.ready.clear)  # cleared with the memory: other memory may follow at its address
    elif planned == algorithm and plan[1:3] == ("flat", "windows") and 0 < tensor.nbytes <= MAX_FLAT_SHARED_BYTES:
        anywhere = on_copies(prepared, tensor.nbytes)  # a loss or a message is a new tensor in each step
    start_and_keep(group, parameters, prepared(address, address), tensor, anywhere=anywhere)


def _is_reduced_in_place(group: Group, tensor: torch.Tensor) -> bool:
    """Return True if a tensor lies in the node's shared memory, and no table of the user's has another choice."""
    free = group.one_node and ("allreduce", "one node") not in group.table.measured
    return free and is_plain(tensor) and group.find_shared(tensor.data_ptr(), tensor.nbytes) is not None


def _sums_what_it_sees(group: Group, tensor: torch.Tensor) -> bool:
    """Return True where a rank has the numbers of all ranks for a chunk, and sums them exactly without an exponent that
    all agree on: on one node, and through sockets."""
    if group.size == 1 or not tensor.is_cpu or tensor.dtype not in FORMATS or tensor.numel() == 0:
        return False
    if group.shared_memory(call_of("an exact sum")) is not None:
        return True
    few = group.size <= MAX_EXACT_RANKS
    return few and group.plan("allreduce", "direct", tensor, EXACT).transport == "sockets"


def _allreduce_of_device(group: Group, tensor: torch.Tensor, algorithm: str, wire: str | None, op: str) -> None:
    transports = device_transports(group, tensor.device)
    if transports.takes(tensor, op, algorithm):
        backend_of(group, tensor.device, allreduce).allreduce(tensor, op, wire, algorithm)
    elif is_direct(group, tensor, op, wire, algorithm):
        allreduce_direct(group, tensor, op, wire, algorithm)
    else:
        allreduce_staged(allreduce, group, tensor, algorithm, wire, op)


def device_transports(group: Group, device: torch.device) -> Transports:
    """Return how sums of a kind of device travel. Called by all ranks together: the first call tries the transports."""
    return transports_of(group, device, allreduce)
