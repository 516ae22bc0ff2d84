"""Fused forms: whole collectives within one node, in fewer passes over memory than a transport makes.

Each equals one schedule, bit for bit: `FUSED[collective, schedule]`. A test compares them.

    allreduce        flat      copy in, barrier, every rank reduces all       up to some ten kilobytes
    allreduce        direct    in place if the payload is in shared memory, else staged in pieces
    reduce_scatter   direct    copy the others' chunks in, barrier, reduce the own
    all_gather       direct    copy the own chunk in, barrier, copy the others' out
    broadcast        tree      the root copies in, barrier, the others copy out
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
from functools import partial

from unisono.call import call_in
from unisono.schedules.pieces import bounds
from unisono.transports.node_memory import NodeMemory, SharedMemory
from unisono.transports.plan import Plan, Play, Prepared
from unisono.transports.staging import (
    flat_allreduce,
    staged_all_gather,
    staged_all_to_all,
    staged_broadcast,
    staged_reduce,
    staged_reduce_scatter,
)
from unisono.transports.steps import Row, copy, kind_of, player_of, reduction

BLOCK_BYTES = 64 << 10
"""Bytes summed at a time: by measurement, the sum is then still cached when it is written to the others."""

FindShared = Callable[[int, int], tuple[str, SharedMemory] | None]
"""Function (address, bytes) -> the location in words, which ranks compare, and the shared memory; None elsewhere."""


def direct_allreduce(memory: NodeMemory, plan: Plan, find: FindShared) -> Prepared:
    """Prepare the allreduce of `direct`: in place for payloads in shared memory; others are staged."""

    def at(address: int, _: int) -> Play:
        location = find(address, plan.nbytes) if plan.nbytes else None
        if location is None:
            return staged_reduce(memory, plan, address)
        where, shared = location
        first = address - shared.start  # the payload of each rank has the same offset in its memory
        rows = rows_in_place([start + first for start in shared.starts], memory.rank, plan)
        call = call_in(plan.call, where)
        return player_of(memory.signals, call, [[[], rows, []]], plan.arithmetic)

    return at


def rows_in_place(starts: Sequence[int], rank: int, plan: Plan) -> list[Row]:
    """Return the rows of `rank` between the barriers. `starts`: addresses of the payloads of all ranks."""
    itemsize, kind = plan.dtype.itemsize, kind_of(plan.dtype, plan.reduction)
    first, last = (itemsize * end for end in bounds(plan.length, len(starts), rank, plan.grain))
    rows: list[Row] = []
    for begin in range(first, last, BLOCK_BYTES):
        nbytes = min(BLOCK_BYTES, last - begin)
        parts = [start + begin for start in starts]
        rows += reduction(kind, parts[rank], parts, nbytes // itemsize)
        rows += [copy(part, parts[rank], nbytes) for index, part in enumerate(parts) if index != rank]
    return rows


def direct_all_gather(memory: NodeMemory, plan: Plan, _: FindShared) -> Prepared:
    """Prepare the all_gather of `direct`, in place: the source is the own chunk of the target."""
    ends = [
        [plan.dtype.itemsize * end for end in bounds(plan.length, memory.size, rank)] for rank in range(memory.size)
    ]
    return lambda _, target: staged_all_gather(
        memory, plan.call, [(target + begin, end - begin) for begin, end in ends]
    )


FUSED: Mapping[tuple[str, str], Callable[[NodeMemory, Plan, FindShared], Prepared]] = {
    ("allreduce", "flat"): flat_allreduce,
    ("allreduce", "direct"): direct_allreduce,
    ("reduce_scatter", "direct"): lambda memory, plan, _: partial(staged_reduce_scatter, memory, plan),
    ("all_gather", "direct"): direct_all_gather,
    ("broadcast", "tree"): lambda memory, plan, _: partial(staged_broadcast, memory, plan),
    ("all_to_all", "direct"): lambda memory, plan, _: partial(staged_all_to_all, memory, plan),
}
"""Functions that prepare a fused form, by collective and by the schedule that it equals."""
