"""Fused forms: whole collectives within one node, in fewer passes over memory than a transport makes.

Each equals one schedule: `FUSED[collective, schedule]`. The results have the same bits; a test
compares them.

    allreduce        flat      copy in, barrier, every rank reduces all       up to some ten kilobytes
    allreduce        direct    in place if the payload is in shared memory, else staged in pieces
    reduce_scatter   direct    copy the others' chunks in, barrier, reduce the own
    all_gather       direct    copy the own chunk in, barrier, copy the others' out
    all_to_all       direct    copy the sent chunks in, barrier, copy the received ones out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.call import Call, call_of
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.node_memory import NodeMemory
from unisono.transports.reduce_in_place import plan_reduce_in_place, reduce_in_place
from unisono.transports.shared_memory import SharedMemory

Start = Callable[[int, int], None]
"""Function (source address, target address) that carries a collective out."""

FindShared = Callable[[int, int], tuple[str, SharedMemory] | None]
"""Function (address, bytes) -> the location in words, which ranks compare, and the shared memory; None elsewhere."""

MAX_IN_PLACE_PLANS = 256
"""Largest number of in-place reductions whose steps a group keeps."""


class FusedCall(NamedTuple):
    """Collective for which a fused form is prepared."""

    length: int
    """Number of elements of the whole payload."""
    dtype: torch.dtype
    arithmetic: Arithmetic
    call: Call

    @property
    def nbytes(self) -> int:
        """Size of the whole payload in bytes."""
        return self.length * self.dtype.itemsize


def flat_allreduce(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the allreduce `flat`, in parts that fit a slot."""
    if fused.nbytes == 0:
        return lambda *_: memory.signals.barrier(fused.call)
    starts = range(0, fused.nbytes, memory.slot)
    plays = [
        memory.staging.flat(min(memory.slot, fused.nbytes - start), fused.arithmetic, fused.call)
        for start in (starts if len(starts) < 3 else (starts[0], starts[-1]))
    ]
    if len(starts) == 1:
        (only,) = plays
        return lambda source, _: only(source)

    def start(source: int, _: int) -> None:
        for first in starts[:-1]:
            plays[0](source + first)
        plays[-1](source + starts[-1])

    return start


def direct_allreduce(memory: NodeMemory, fused: FusedCall, find: FindShared) -> Start:
    """Prepare the allreduce `direct`: in place for payloads in shared memory, with cached steps; others are staged."""
    in_place_plans, number = memory.in_place_plans, fused.call.number

    def start(source: int, _: int) -> None:
        if (planned := in_place_plans.get((source, number))) is not None:
            steps, call = planned
            reduce_in_place(steps, memory.signals, call)
            return
        found = find(source, fused.nbytes) if fused.nbytes else None
        if found is None:
            view = fused.arithmetic.view(MPI.memory.fromaddress(source, fused.nbytes))
            memory.staging.reduce(view, fused.dtype.itemsize, fused.arithmetic, fused.call)
            return
        where, shared = found
        views = views_in(shared, source, fused)
        if len(in_place_plans) == MAX_IN_PLACE_PLANS:
            in_place_plans.clear()
        steps = plan_reduce_in_place(views, memory.signals.rank, fused.dtype.itemsize, fused.arithmetic)
        call = call_of(f"{fused.call.words} in {where}")
        shared.plan(in_place_plans)
        in_place_plans[source, number] = steps, call
        reduce_in_place(steps, memory.signals, call)

    return start


def views_in(shared: SharedMemory, address: int, fused: FusedCall) -> list[object]:
    """Return every rank's payload, at the same offset in its shared memory as this rank's."""
    first = address - shared.start
    return [fused.arithmetic.view(buffer[first : first + fused.nbytes]) for buffer in shared.buffers]


def direct_reduce_scatter(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the reduce_scatter of `direct`. The target may be the own chunk of the source."""
    itemsize, rank, size = fused.dtype.itemsize, memory.signals.rank, memory.signals.size
    begin, end = bounds(fused.length, size, rank)

    def start(source: int, target: int) -> None:
        view = fused.arithmetic.view
        payload = view(MPI.memory.fromaddress(source, fused.nbytes))
        in_place = target == source + begin * itemsize
        shard = None if in_place else view(MPI.memory.fromaddress(target, (end - begin) * itemsize))
        memory.staging.reduce_scatter(payload, shard, itemsize, fused.arithmetic, fused.call)

    return start


def direct_all_gather(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the all_gather of `direct`, in place: the source is the own chunk of the target."""
    itemsize, size = fused.dtype.itemsize, memory.signals.size
    ends = [bounds(fused.length, size, rank) for rank in range(size)]

    def start(_: int, target: int) -> None:
        whole = bytes_at(target, fused.nbytes)
        memory.slot_transfers.all_gather(
            [whole[start * itemsize : stop * itemsize] for start, stop in ends], fused.call
        )

    return start


def direct_all_to_all(memory: NodeMemory, fused: FusedCall, _: FindShared) -> Start:
    """Prepare the all_to_all of `direct`, from the source to the target."""
    shape = memory.signals.size, fused.nbytes // memory.signals.size

    def start(source: int, target: int) -> None:
        sends, receives = (bytes_at(address, fused.nbytes).reshape(shape) for address in (source, target))
        memory.slot_transfers.all_to_all(sends, receives, fused.call)

    return start


def bytes_at(address: int, nbytes: int) -> Array:
    """Return the bytes at an address as an array; the caller keeps the memory alive."""
    memory: Any = MPI.memory.fromaddress(address, nbytes)
    return np.frombuffer(memory, np.uint8)


FUSED: Mapping[tuple[str, str], Callable[[NodeMemory, FusedCall, FindShared], Start]] = {
    ("allreduce", "flat"): flat_allreduce,
    ("allreduce", "direct"): direct_allreduce,
    ("reduce_scatter", "direct"): direct_reduce_scatter,
    ("all_gather", "direct"): direct_all_gather,
    ("all_to_all", "direct"): direct_all_to_all,
}
"""Functions that prepare a fused form, by collective and by the schedule that it equals."""
