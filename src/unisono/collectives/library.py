"""Allreduce by the MPI library itself, with a check across nodes that all ranks are in the same call.

A payload of some kilobytes carries the check along, in one exchange:

    mine      | f  f'  f²  f'²  | payload ...  | 0 0 ...         f, f': the call's fingerprint in small numbers
    sum       | pf pf' pf² pf'² | sum ...      |                 of p ranks, where all are in the same call

The sum of the squares equals p times the square of the mean only where all are equal, so one different rank shows at
every rank. The parcel is of one of a few lengths, so that most ranks that differ exchange as many bytes; of the
others the library itself says that a message was truncated, or they wait and are found by the watch. One number
travels in 16 bytes, widened to 64 bits: that much is sent faster here. A longer payload is preceded by an exchange of
16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.collectives.group import Group, Plan
from unisono.collectives.payload import MPI_TYPES, memory_of
from unisono.mpi import MPI
from unisono.transports.arithmetic import HALF_DTYPES, NUMPY_DTYPES
from unisono.transports.windows import Call

PARCELS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Bytes of payload for which there is room beside the check."""

HEAD = 64
"""Bytes of the check of a parcel."""

FIELDS, BITS = 4, 5
"""The fingerprint's numbers, and the bits of each: squares of them summed over 16,384 ranks are exact in float32."""

ADDRESSES = 64
"""Addresses whose views are kept for one length."""

MOST_RANKS = 1 << (24 - 2 * BITS)

WIDE = {
    torch.float32: torch.float64,
    torch.float64: torch.float64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
}
"""What one number of a dtype is summed as."""


def allreduce_by_library(group: Group, tensor: torch.Tensor, plan: Plan) -> None:
    """Sum a contiguous tensor in place; the half types, which MPI may not know, as float32."""
    exact = tensor.float() if tensor.dtype in HALF_DTYPES else tensor
    with group.call(plan.what, in_library=True):
        group.agree(plan.what)
        group.comm.Allreduce(MPI.IN_PLACE, [memory_of(exact), exact.numel(), MPI_TYPES[exact.dtype]])
    if exact is not tensor:
        tensor.detach().copy_(exact)


def carries_check(group: Group, tensor: torch.Tensor) -> bool:
    """Whether the payload is short enough, of a fit dtype, and goes across nodes."""
    fit = tensor.dtype in WIDE and 0 < tensor.nbytes <= PARCELS[-1]
    return fit and group.watch is not None and group.size <= MOST_RANKS


def plan_short(group: Group, length: int, dtype: torch.dtype, what: Call) -> Callable[[int], None]:
    """A function that sums the `length` elements at the address it is given, in place."""
    narrow = NUMPY_DTYPES[dtype]
    numbers = fingerprint(what)
    if length == 1:
        kind = WIDE[dtype]
        check = np.array([single_check(what)], NUMPY_DTYPES[kind])
        room = 1
    else:
        kind = dtype
        check = np.zeros(HEAD // dtype.itemsize, narrow)
        check[: 2 * FIELDS] = [*numbers, *(number * number for number in numbers)]
        room = next(parcel for parcel in PARCELS if parcel >= length * dtype.itemsize) // dtype.itemsize
    whole = np.zeros(len(check) + room, check.dtype)
    head, body = whole[: len(check)], whole[len(check) : len(check) + length]
    expected = (check * group.size).tobytes()
    buffer = [whole, MPI_TYPES[kind]]
    nbytes = length * dtype.itemsize
    watch, allreduce = group.watch, group.comm.Allreduce
    assert watch is not None, "a group across nodes"
    seen: dict[int, Any] = {}

    def play(address: int) -> None:
        payload = seen.get(address)
        if payload is None:
            if len(seen) == ADDRESSES:
                seen.clear()
            memory: Any = MPI.memory.fromaddress(address, nbytes)
            payload = seen[address] = np.frombuffer(memory, narrow)
        head[:] = check
        body[:] = payload
        outer = watch.begin(what.words, True)
        try:
            allreduce(MPI.IN_PLACE, buffer)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            head[:] = 0
        finally:
            watch.end(outer)
        if head.tobytes() != expected:
            with group.call(what, in_library=True):
                group.disagree(what)
        payload[:] = body

    return play


def fingerprint(what: Call) -> list[int]:
    """The call's number as FIELDS small ones."""
    return [what.number >> (BITS * field) & ((1 << BITS) - 1) for field in range(FIELDS)]


def single_check(what: Call) -> int:
    """Eight bits of the call's number and their square in one, exact in float64 when summed over 16,384 ranks."""
    number = what.number & 0xFF
    return (number * number) << 22 | number
