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

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.collectives.group import Group
from unisono.collectives.payload import MPI_TYPES, memory_of
from unisono.collectives.plans import Plan
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

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers of as many bits."""

ADDRESSES = 64
"""Addresses whose views are kept for one length."""


OPS = {
    "sum": MPI.SUM,
    "product": MPI.PROD,
    "minimum": MPI.MIN,
    "maximum": MPI.MAX,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}

BOOL_OPS = {**OPS, "sum": MPI.BOR, "product": MPI.BAND}
"""The ops of bools, which MPI sees as bytes that are 0 or 1."""


def numbers_of(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, MPI.Datatype, MPI.Op]:
    """What stands for a contiguous tensor in the library: the tensor itself where the library can reduce it as it is.

    The half types, which MPI may not know, become float32. For minimum and maximum floating-point numbers become
    integers: of a NaN and a number MPI may take either, and another one on another rank.
    """
    numbers = tensor.float() if tensor.dtype in HALF_DTYPES else tensor
    if tensor.is_floating_point() and op in ("minimum", "maximum"):
        nan = math.copysign(math.nan, 1 if op == "maximum" else -1)  # greater, or less, than all others as an integer
        numbers = _turn(torch.where(numbers.isnan(), nan, numbers).view(INTEGERS[numbers.dtype]))
    ops = BOOL_OPS if tensor.dtype is torch.bool else OPS
    return numbers, MPI_TYPES[numbers.dtype], ops[op]


def restore(numbers: torch.Tensor, into: torch.Tensor) -> None:
    """Put what the library has made of `numbers_of` a tensor into one of that tensor's dtype and the same length."""
    if into.is_floating_point() and not numbers.is_floating_point():
        numbers = _turn(numbers)
        numbers = numbers.view(next(dtype for dtype, integer in INTEGERS.items() if integer is numbers.dtype))
    if numbers.data_ptr() != into.data_ptr():
        into.copy_(numbers)


def _turn(bits: torch.Tensor) -> torch.Tensor:
    """Floating-point numbers' bits as integers in the order of the numbers, or such integers as bits."""
    width = 8 * bits.dtype.itemsize
    return bits ^ ((bits >> (width - 1)) & ((1 << (width - 1)) - 1))


def allreduce_by_library(group: Group, tensor: torch.Tensor, op: str, plan: Plan) -> None:
    """Reduce a contiguous tensor in place."""
    flat = tensor.detach().view(-1)
    numbers, kind, reduction = numbers_of(flat, op)
    with group.library_call(plan.what):
        group.comm.Allreduce(MPI.IN_PLACE, [memory_of(numbers), numbers.numel(), kind], reduction)
    restore(numbers, flat)


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
    watch, words, interruptible = group.watch, what.words, group.interrupted is not None
    allreduce = _allreduce_in_steps(group) if interruptible else group.comm.Allreduce
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
        outer = watch.begin(words, not interruptible)
        try:
            allreduce(MPI.IN_PLACE, buffer)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            head[:] = bytes(len(head))
        finally:
            watch.end(outer)
        if head.tobytes() != expected:
            with group.call(what):
                group.disagree(what)
        payload[:] = body

    return play


def _allreduce_in_steps(group: Group) -> Callable[[Any, Any], None]:
    """An allreduce whose wait is ours, so that it can be ended."""

    def allreduce(mine: Any, buffer: Any) -> None:
        group.finish(group.comm.Iallreduce(mine, buffer), buffer)

    return allreduce


def fingerprint(what: Call, fields: int) -> list[int]:
    """The call's number, whole or in `fields` numbers of BITS bits; none of them 0."""
    if fields == 1:
        return [what.number + 1]
    return [(what.number >> (BITS * field) & ((1 << BITS) - 1)) + 1 for field in range(fields)]
