"""Collectives of the MPI library, with a check across nodes that all ranks are in the same call.

A sum of up to 64 KiB carries the check along, in one exchange; f, f', f" are 60 bits of the call's digest:

    mine      |  f   f'  f"  | payload ...  | 0 0 ...         in small numbers
    sum       | pf  pf' pf"  | sum ...      |                 of p ranks, where all are in the same call

If one rank is in another call, no rank finds p times its own digest. The parcel has one of a few lengths, so that most
ranks in different calls exchange equally many bytes. Otherwise the library reports a truncated message, or the ranks
wait and the watch finds them. A payload of one number has a check of 30 bits: together 16 bytes, which are faster than
20 here, and only other calls of one number can match it.

An exchange of 16 bytes precedes all other calls, also those of short payloads: a rank may refuse its arguments in a
broadcast or a gathering alone, and is then in an exchange of 16 bytes, too.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unisono.call import Call, call_of
from unisono.collectives.payload import MPI_TYPES, memory_of, share_memory
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import HALF_DTYPES, NUMPY_DTYPES, tensor_over
from unisono.transports.exact import integers
from unisono.transports.plan import Plan, Play, Prepared

if TYPE_CHECKING:
    from unisono.collectives.group import Group

CHECKED_PAYLOAD_BYTES = (128, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Sizes of a parcel's payload in bytes, without the check."""

FINGERPRINT_BITS = {torch.float32: 10, torch.float64: 30, torch.int32: 10, torch.int64: 30}
"""Bits in each number of the fingerprint: sums over MAX_CHECKED_RANKS are exact."""

MAX_CHECKED_RANKS = 1 << 14
"""Largest number of ranks over which sums of fingerprints are exact."""

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
"""Ops for bool tensors, which MPI sees as bytes of 0 or 1."""


def numbers_of(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, MPI.Datatype, MPI.Op]:
    """Return a tensor that the library can reduce in place of a contiguous `tensor` (if possible itself), type and op.

    float16 and bfloat16, which MPI may not know, become float32. For minimum and maximum, floating-point numbers become
    integers: between a NaN and a number, MPI may choose either, and differently on each rank.
    """
    numbers = tensor.float() if tensor.dtype in HALF_DTYPES else tensor
    if tensor.is_floating_point() and op in ("minimum", "maximum"):
        nan = math.copysign(math.nan, 1 if op == "maximum" else -1)  # greater, or less, than all others as an integer
        numbers = _swap_order(integers(torch.where(numbers.isnan(), nan, numbers)))
    ops = BOOL_OPS if tensor.dtype is torch.bool else OPS
    return numbers, MPI_TYPES[numbers.dtype], ops[op]


def restore(numbers: torch.Tensor, into: torch.Tensor) -> None:
    """Convert a reduced `numbers_of(tensor)` back, into a tensor of the original dtype and the same length."""
    if into.is_floating_point() and not numbers.is_floating_point():
        numbers = _swap_order(numbers).view(torch.float64 if into.dtype is torch.float64 else torch.float32)
    if numbers.data_ptr() != into.data_ptr():
        into.copy_(numbers)


def _swap_order(bits: torch.Tensor) -> torch.Tensor:
    """Convert bits of floating-point numbers to integers of the same order, or such integers back to bits."""
    width = 8 * bits.dtype.itemsize
    return bits ^ ((bits >> (width - 1)) & ((1 << (width - 1)) - 1))


def by_library(group: Group, plan: Plan) -> Prepared:
    """Prepare a collective that the MPI library carries out."""
    if plan.op is None:
        return _move(group, plan)
    return (_reduce_scatter if plan.collective == "reduce_scatter" else _reduce)(group, plan)


def _reduce(group: Group, plan: Plan) -> Prepared:
    """Prepare an allreduce, or a reduction to the root alone."""
    root = plan.root if plan.collective == "reduce" else None
    if root is None and plan.op == "sum" and _carries_check(group, plan):
        return _checked_sum(group, plan.length, plan.dtype, plan.call)
    comm, receives = group.comm, root in (None, group.rank)

    def at(_: int, target: int) -> Play:
        flat = _tensor_at(target, plan.length, plan.dtype)

        def play() -> None:
            numbers, kind, reduction = numbers_of(flat, plan.op or "sum")
            buffer = [memory_of(numbers), numbers.numel(), kind]
            with group.enter_library_call(plan.call):
                if root is None:
                    comm.Allreduce(MPI.IN_PLACE, buffer, reduction)
                else:
                    comm.Reduce(MPI.IN_PLACE if receives else buffer, buffer if receives else None, reduction, root)
            if receives:
                restore(numbers, flat)

        return play

    return at


def _reduce_scatter(group: Group, plan: Plan) -> Prepared:
    counts, _ = _chunks_of(group, plan)

    def at(source: int, target: int) -> Play:
        flat = _tensor_at(source, plan.length, plan.dtype)
        shard = _tensor_at(target, counts[group.rank], plan.dtype)
        apart = not share_memory(shard, flat)  # MPI takes no memory that is both

        def play() -> None:
            numbers, kind, reduction = numbers_of(flat, plan.op or "sum")
            fit = shard.dtype is numbers.dtype and (apart or numbers is not flat)
            part = shard if fit else torch.empty(len(shard), dtype=numbers.dtype, device="cpu")
            sendbuf, recvbuf = [memory_of(numbers), numbers.numel(), kind], [memory_of(part), part.numel(), kind]
            with group.enter_library_call(plan.call):
                group.comm.Reduce_scatter(sendbuf, recvbuf, counts, reduction)
            restore(part, shard)

        return play

    return at


def _chunks_of(group: Group, plan: Plan) -> tuple[list[int], list[int]]:
    """Return the length and the start of each rank's chunk."""
    ends = [bounds(plan.length, group.size, rank) for rank in range(group.size)]
    return [stop - start for start, stop in ends], [start for start, _ in ends]


def _move(group: Group, plan: Plan) -> Prepared:
    """Prepare an all_gather, a broadcast or an all_to_all, in which nothing is reduced."""
    comm, chunks, each = group.comm, _chunks_of(group, plan), plan.nbytes // group.size

    def at(source: int, target: int) -> Play:
        memory = MPI.memory.fromaddress(target, plan.nbytes)
        if plan.collective == "all_gather":
            act = partial(comm.Allgatherv, MPI.IN_PLACE, [memory, *chunks, MPI_TYPES[plan.dtype]])
        elif plan.collective == "broadcast":
            act = partial(comm.Bcast, [memory, MPI.BYTE], plan.root)
        else:
            outgoing = MPI.memory.fromaddress(source, plan.nbytes)
            act = partial(comm.Alltoall, [outgoing, each, MPI.BYTE], [memory, each, MPI.BYTE])

        def play() -> None:
            with group.enter_library_call(plan.call):
                act()

        return play

    return at


def _tensor_at(address: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over memory at an address, which the caller keeps alive."""
    return tensor_over(MPI.memory.fromaddress(address, length * dtype.itemsize), dtype)


def _carries_check(group: Group, plan: Plan) -> bool:
    """Return True if the payload is short enough, of a supported dtype, and goes across nodes."""
    fit = plan.dtype in FINGERPRINT_BITS and 0 < plan.nbytes <= CHECKED_PAYLOAD_BYTES[-1]
    return fit and group.shared_memory(plan.call) is None and group.size <= MAX_CHECKED_RANKS


def _checked_sum(group: Group, length: int, dtype: torch.dtype, call: Call) -> Prepared:
    """Prepare the sum of `length` elements in place, with the check in the same message."""
    nbytes = length * dtype.itemsize
    payload_bytes = nbytes if length == 1 else next(size for size in CHECKED_PAYLOAD_BYTES if size >= nbytes)
    check = _check_of(call, dtype, length)
    parcel = np.zeros(len(check) + payload_bytes // dtype.itemsize, check.dtype)
    memory = memoryview(parcel.view(np.uint8))  # type: ignore[arg-type]
    header, body = memory[: check.nbytes], memory[check.nbytes : check.nbytes + nbytes]
    unlabelled = check.tobytes(), (check * group.size).tobytes()
    buffer = [parcel, MPI_TYPES[dtype]]

    def at(_: int, address: int) -> Play:
        view: Any = MPI.memory.fromaddress(address, nbytes)
        payload = memoryview(view)

        def play() -> None:
            sent, expected = unlabelled
            if group.label:
                check = _check_of(call_of(call.description + group.label), dtype, length)
                sent, expected = check.tobytes(), (check * group.size).tobytes()
            header[:] = sent
            body[:] = payload
            if not _sum_in_call(group, call, buffer) or header.tobytes() != expected:
                with group.enter_call(call):
                    group.raise_mismatch(call)
            payload[:] = body

        return play

    return at


def _sum_in_call(group: Group, call: Call, buffer: Any) -> bool:
    """Sum a buffer in place in the call; return False for a truncated message.

    The wait is our own, which lets go of the library between its polls. One in the library keeps its lock most of the
    time: messages of other threads, such as those of split layers beside an exchange of gradients, then took seconds.
    """
    outer = group.calls.begin(call.description + group.label, in_library=False)
    try:
        group.wait_for(group.comm.Iallreduce(MPI.IN_PLACE, buffer), buffer)
    except MPI.Exception as error:
        if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            raise
        return False
    finally:
        group.calls.end(outer)
    return True


def _check_of(call: Call, dtype: torch.dtype, length: int) -> Any:
    """Return the check for a payload of that length: 60 bits of the call's digest, 30 for a single element."""
    bits = FINGERPRINT_BITS[dtype]
    fields = range((30 if length == 1 else 60) // bits)
    numbers = [(call.digest >> (bits * field) & ((1 << bits) - 1)) + 1 for field in fields]  # none is 0
    return np.array(numbers, NUMPY_DTYPES[dtype])
