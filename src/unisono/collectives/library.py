"""Allreduce by the MPI library itself, with a check across nodes that all ranks are in the same call.

A payload of some kilobytes carries the check along, in one exchange:

    mine      |  f   f'  f"  | payload ...  | 0 0 ...         f, f', f": 60 bits of the call's, in small numbers
    sum       | pf  pf' pf"  | sum ...      |                 of p ranks, where all are in the same call

If one rank is in another call, no rank finds p times its own number. The parcel is of one of a few lengths, so that
most ranks that differ exchange as many bytes; of the others the library itself says that a message was truncated, or
they wait and are found by the watch. One number with its check, of 30 bits, has 16 bytes, which travel faster than 20
here: only calls of one number can meet it. A longer payload is preceded by an exchange of 16 bytes.
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
from unisono.transports.windows import Call, call

PARCELS = (1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Bytes of payload for which there is room beside the check."""

BITS = {torch.float32: 10, torch.float64: 30, torch.int32: 10, torch.int64: 30}
"""Bits of each number of the fingerprint: summed over MOST_RANKS they are exact."""

MOST_RANKS = 1 << 14

FIELDS = {torch.float32: 3, torch.float64: 1, torch.int32: 3, torch.int64: 1}
"""How many numbers of a dtype carry 30 bits: beside one number of payload, of which there are few calls."""

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


def carries_check(group: Group, tensor: torch.Tensor, what: Call) -> bool:
    """Whether the payload of the call `what` is short enough, of a fit dtype, and goes across nodes."""
    fit = tensor.dtype in FIELDS and 0 < tensor.nbytes <= PARCELS[-1]
    return fit and not group.compares_by_memory(what) and group.size <= MOST_RANKS


def plan_short(group: Group, length: int, dtype: torch.dtype, what: Call) -> Callable[[int], None]:
    """A function that sums the `length` elements at the address it is given, in place."""
    nbytes = length * dtype.itemsize
    room = nbytes if length == 1 else next(parcel for parcel in PARCELS if parcel >= nbytes)
    check = _check_of(what, dtype, length)
    whole = np.zeros(len(check) + room // dtype.itemsize, check.dtype)
    memory = memoryview(whole.view(np.uint8))  # type: ignore[arg-type]
    head, body = memory[: check.nbytes], memory[check.nbytes : check.nbytes + nbytes]
    unlabelled = check.tobytes(), (check * group.size).tobytes()
    buffer = [whole, MPI_TYPES[dtype]]
    calls, words, interruptible = group.calls, what.words, group.interrupted is not None
    allreduce = _allreduce_in_steps(group) if interruptible else group.comm.Allreduce
    seen: dict[int, Any] = {}

    def play(address: int) -> None:
        payload = seen.get(address)
        if payload is None:
            if len(seen) == ADDRESSES:
                seen.clear()
            place: Any = MPI.memory.fromaddress(address, nbytes)
            payload = seen[address] = memoryview(place)
        mine, expected = unlabelled
        if group.label:
            check = _check_of(call(words + group.label), dtype, length)
            mine, expected = check.tobytes(), (check * group.size).tobytes()
        head[:] = mine
        body[:] = payload
        outer = calls.begin(words + group.label, not interruptible)
        try:
            allreduce(MPI.IN_PLACE, buffer)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            head[:] = bytes(len(head))
        finally:
            calls.end(outer)
        if head.tobytes() != expected:
            with group.call(what):
                group.disagree(what)
        payload[:] = body

    return play


def _check_of(what: Call, dtype: torch.dtype, length: int) -> Any:
    """The call's number in front of a payload of that length: half of it where the payload is a single number."""
    fields = FIELDS[dtype] if length == 1 else 2 * FIELDS[dtype]
    return np.array(fingerprint(what, fields, BITS[dtype]), NUMPY_DTYPES[dtype])


def _allreduce_in_steps(group: Group) -> Callable[[Any, Any], None]:
    """An allreduce whose wait is ours, so that it can be ended."""

    def allreduce(mine: Any, buffer: Any) -> None:
        group.finish(group.comm.Iallreduce(mine, buffer), buffer)

    return allreduce


def fingerprint(what: Call, fields: int, bits: int) -> list[int]:
    """The lowest bits of the call's number, in `fields` numbers of `bits` bits; none of them 0."""
    return [(what.number >> (bits * field) & ((1 << bits) - 1)) + 1 for field in range(fields)]
