"""Fused forms: whole collectives within one node, in fewer passes over memory than a transport makes.

Each equals one schedule, bit for bit: `FUSED[collective, schedule]`. A test compares them.

    allreduce        flat      copy in, barrier, every rank reduces all       up to some ten kilobytes
    allreduce        direct    in place if the payload is in shared memory, else staged in pieces
    reduce_scatter   direct    copy the others' chunks in, barrier, reduce the own
    all_gather       direct    copy the own chunk in, barrier, copy the others' out
    all_to_all       direct    copy the sent chunks in, barrier, copy the received ones out

In place, the two rounds of `direct` are one pass, without a copy and with two barriers. Each rank owns a segment, the
chunk of its number. Between the barriers no other rank accesses that segment in any rank's memory. So each summed block
is written to all ranks at once, while it is still in the cache:

    2 ranks            rank 0's memory      rank 1's memory
    segment 0          A  ──────┬─────────  B                 rank 0:  A+B → both
    segment 1          C  ──────┴─────────  D                 rank 1:  C+D → both

Memory traffic of each rank: n bytes read and n written, as for a copy of n bytes. That is the lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.call import call_in
from unisono.mpi import MPI
from unisono.schedules.pieces import bounds
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.node_memory import NodeMemory, SharedMemory
from unisono.transports.plan import Plan, Play, Prepared, bytes_at, started
from unisono.transports.staging import SlotTransfers, flat_allreduce, reduce_scatter_by_slots, staged_reduce

BLOCK_BYTES = 512 << 10
"""Bytes summed at a time: by measurement, the sum is then still cached when it is written to the others."""

FindShared = Callable[[int, int], tuple[str, SharedMemory] | None]
"""Function (address, bytes) -> the location in words, which ranks compare, and the shared memory; None elsewhere."""


def direct_allreduce(memory: NodeMemory, plan: Plan, find: FindShared) -> Prepared:
    """Prepare the allreduce of `direct`: in place for payloads in shared memory; others are staged."""

    def at(address: int, _: int) -> Play:
        found = find(address, plan.nbytes) if plan.nbytes else None
        if found is None:
            return staged_reduce(memory, plan, plan.arithmetic.view(MPI.memory.fromaddress(address, plan.nbytes)))
        where, shared = found
        first = address - shared.start  # the payload of each rank has the same offset in its memory
        views = [plan.arithmetic.view(buffer[first : first + plan.nbytes]) for buffer in shared.buffers]
        steps = plan_reduce_in_place(views, memory.rank, plan.dtype.itemsize, plan.arithmetic)
        barrier = memory.signals.prepare_barrier(call_in(plan.call, where))

        def play() -> None:
            barrier()
            perform(steps)
            barrier()

        return play

    return at


def plan_reduce_in_place(views: Sequence[Any], rank: int, itemsize: int, arithmetic: Arithmetic) -> list[Step]:
    """Return the steps of `rank` between the barriers. `views`: payloads of all ranks, of equal length and dtype."""
    start, stop = bounds(len(views[rank]), len(views), rank)
    length = BLOCK_BYTES // itemsize
    steps: list[Step] = []
    for first in range(start, stop, length):
        parts = [view[first : min(stop, first + length)] for view in views]
        steps += arithmetic.reduce(parts, parts[rank], parts[0])  # the result replaces all
        steps += [arithmetic.copy(part, parts[rank]) for index, part in enumerate(parts) if index != rank]
    return steps


def direct_reduce_scatter(memory: NodeMemory, plan: Plan, _: FindShared) -> Prepared:
    """Prepare the reduce_scatter of `direct`. The target may be the own chunk of the source."""
    view, itemsize = plan.arithmetic.view, plan.dtype.itemsize
    begin, end = bounds(plan.length, memory.size, memory.rank)

    def start(source: int, target: int) -> None:
        payload = view(MPI.memory.fromaddress(source, plan.nbytes))
        in_place = target == source + begin * itemsize
        shard = payload[begin:end] if in_place else view(MPI.memory.fromaddress(target, (end - begin) * itemsize))
        reduce_scatter_by_slots(memory, plan, payload, shard)

    return started(start)


def direct_all_gather(memory: NodeMemory, plan: Plan, _: FindShared) -> Prepared:
    """Prepare the all_gather of `direct`, in place: the source is the own chunk of the target."""
    ends = [[plan.dtype.itemsize * end for end in bounds(plan.length, memory.size, one)] for one in range(memory.size)]

    def start(_: int, target: int) -> None:
        whole = bytes_at(target, plan.nbytes)
        SlotTransfers(memory, plan.call).all_gather([whole[begin:end] for begin, end in ends])

    return started(start)


def direct_all_to_all(memory: NodeMemory, plan: Plan, _: FindShared) -> Prepared:
    """Prepare the all_to_all of `direct`, from the source to the target."""
    shape = memory.size, plan.nbytes // memory.size

    def start(source: int, target: int) -> None:
        sends, receives = (bytes_at(address, plan.nbytes).reshape(shape) for address in (source, target))
        SlotTransfers(memory, plan.call).all_to_all(sends, receives)

    return started(start)


FUSED: Mapping[tuple[str, str], Callable[[NodeMemory, Plan, FindShared], Prepared]] = {
    ("allreduce", "flat"): flat_allreduce,
    ("allreduce", "direct"): direct_allreduce,
    ("reduce_scatter", "direct"): direct_reduce_scatter,
    ("all_gather", "direct"): direct_all_gather,
    ("all_to_all", "direct"): direct_all_to_all,
}
"""Functions that prepare a fused form, by collective and by the schedule that it equals."""
