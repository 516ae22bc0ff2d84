"""Allreduce by the MPI library itself, with a check across nodes that all ranks are in the same call.

A payload of some kilobytes carries the check along, in one exchange:

    mine      |  f   f'  f"  | payload ...  | 0 0 ...         f, f', f": the call's fingerprint, in small numbers
    sum       | pf  pf' pf"  | sum ...      |                 of p ranks, where all are in the same call

If one rank is in another call, no rank finds p times its own number. The parcel is of one of a few lengths, so that
most ranks that differ exchange as many bytes; of the others the library itself says that a message was truncated, or
they wait and are found by the watch. One number with its check has 16 bytes, which travel faster than 20 here. A longer
payload is preceded by an exchange of 16 bytes.
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

BITS = 10
"""Bits of each number of the fingerprint: summed over 16,384 ranks they are exact in float32."""

MOST_RANKS = 1 << (24 - BITS)

FIELDS = {torch.float32: 3, torch.float64: 1, torch.int32: 3, torch.int64: 1}
"""How many numbers of a dtype carry the check; one of 64 bits holds all of it."""

ADDRESSES = 64
"""Addresses whose views are kept for one length."""


def allreduce_by_library(group: Group, tensor: torch.Tensor, plan: Plan) -> None:
    """Sum a contiguous tensor in place; the half types, which MPI may not know, as float32."""
    exact = tensor.float() if tensor.dtype in HALF_DTYPES else tensor
    with group.library_call(plan.what):
        group.comm.Allreduce(MPI.IN_PLACE, [memory_of(exact), exact.numel(), MPI_TYPES[exact.dtype]])
    if exact is not tensor:
        tensor.detach().copy_(exact)


def carries_check(group: Group, tensor: torch.Tensor) -> bool:
    """Whether the payload is short enough, of a fit dtype, and goes across nodes."""
    fit = tensor.dtype in FIELDS and 0 < tensor.nbytes <= PARCELS[-1]
    return fit and group.watch is not None and group.size <= MOST_RANKS


def plan_short(group: Group, length: int, dtype: torch.dtype, what: Call) -> Callable[[int], None]:
    """A function that sums the `length` elements at the address it is given, in place."""
    nbytes = length * dtype.itemsize
    room = nbytes if length == 1 else next(parcel for parcel in PARCELS if parcel >= nbytes)
    check = np.array(fingerprint(what, FIELDS[dtype]), NUMPY_DTYPES[dtype])
    whole = np.zeros(len(check) + room // dtype.itemsize, check.dtype)
    memory = memoryview(whole.view(np.uint8))  # type: ignore[arg-type]
    head, body = memory[: check.nbytes], memory[check.nbytes : check.nbytes + nbytes]
    mine, expected = check.tobytes(), (check * group.size).tobytes()
    buffer = [whole, MPI_TYPES[dtype]]
    watch, allreduce, words = group.watch, group.comm.Allreduce, what.words
    assert watch is not None, "a group across nodes"
    seen: dict[int, Any] = {}

    def play(address: int) -> None:
        payload = seen.get(address)
        if payload is None:
            if len(seen) == ADDRESSES:
                seen.clear()
            place: Any = MPI.memory.fromaddress(address, nbytes)
            payload = seen[address] = memoryview(place)
        head[:] = mine
        body[:] = payload
        outer = watch.begin(words, True)
        try:
            allreduce(MPI.IN_PLACE, buffer)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            head[:] = bytes(len(head))
        finally:
            watch.end(outer)
        if head.tobytes() != expected:
            with group.call(what, in_library=True):
                group.disagree(what)
        payload[:] = body

    return play


def fingerprint(what: Call, fields: int) -> list[int]:
    """The call's number, whole or in `fields` numbers of BITS bits; none of them 0."""
    if fields == 1:
        return [what.number + 1]
    return [(what.number >> (BITS * field) & ((1 << BITS) - 1)) + 1 for field in range(fields)]
