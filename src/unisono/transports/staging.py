"""Reductions within one node for tensors in any memory, through slots in a shared window.

    flat             copy in, barrier, each rank reduces all slots                      1 barrier, p x n read by each
    reduce           copy the others' segments in, barrier, reduce the own, barrier, copy out     2 barriers a piece

                     rank 0's slot   | ...... | B0 | C0 |        rank 1 reduces B0, its own B and B2, and writes the
                     rank 1's slot   | A1 | ...... | C1 |        result over B0 and B2: each rank finds all results in
                     rank 2's slot   | A2 | B2 | ...... |        its own slot. The lines that carried the terms carry
                                                                the result: one line changes caches twice, where a
                                                                result in a slot of its own moves two lines twice
    reduce_scatter   copy the others' chunks in, barrier, reduce the own chunk of all slots       1 barrier a piece

A rank reads its own contribution directly from the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.mpi import MPI
from unisono.schedules.pieces import bounds, cut
from unisono.transports.arithmetic import Arithmetic, Step, perform
from unisono.transports.node_memory import NodeMemory
from unisono.transports.plan import Plan, Play, Prepared
from unisono.transports.signals import INLINE_BYTES


def flat_allreduce(memory: NodeMemory, plan: Plan, _: object) -> Prepared:
    """Prepare the allreduce of `flat`, in parts that fit a slot."""
    starts = range(0, max(1, plan.nbytes), memory.slot)
    parts = [(start, _flat(memory, plan, min(memory.slot, plan.nbytes - start))) for start in starts]

    def at(address: int, _: int) -> Play:
        plays = [prepare(address + first, 0) for first, prepare in parts]
        if len(plays) == 1:
            return plays[0]

        def play() -> None:
            for one in plays:
                one()

        return play

    return at


def _flat(memory: NodeMemory, plan: Plan, nbytes: int) -> Prepared:
    """Prepare the reduction of a part of `nbytes` bytes, at most a slot.

    For a few bytes the Python code takes most of the time, so everything possible is computed beforehand. The shortest
    payloads travel beside the tokens of the barrier.
    """
    signals, barrier, whole = memory.signals, memory.signals.prepare_barrier(plan.call), slice(None)
    lines: Any = signals.inline if nbytes <= INLINE_BYTES else memory.slots
    slots = [[memoryview(slot)[:nbytes] for slot in ranks] for ranks in lines]
    arithmetic, entries, count = plan.arithmetic, [slot[memory.rank] for slot in slots], len(slots)
    views = [[arithmetic.view(part) for part in slot] for slot in slots]

    def at(address: int, _: int) -> Play:
        payload: Any = MPI.memory.fromaddress(address, nbytes)
        into = arithmetic.view(payload)
        planned = [(entry, arithmetic.reduce(slot, into)) for entry, slot in zip(entries, views, strict=True)]

        def play() -> None:
            entry, reductions = planned[(signals.sequence + 1) % count]
            entry[whole] = payload
            barrier()
            for function, arguments in reductions:
                function(*arguments)

        return play

    return at


def staged_reduce(memory: NodeMemory, plan: Plan, payload: Any, root: int | None = None) -> Play:
    """Return a function that reduces `payload`, a view of any length, in place: on `root`, or if None on all ranks.

    Every rank reduces its segment of each piece. The steps of a payload of one piece are planned here, once.
    """
    cuts = cut(len(payload), 1, memory.slot // plan.dtype.itemsize)
    parts = [payload[cuts.region(piece, 0)] for piece in range(cuts.pieces)]
    barrier, views = memory.signals.prepare_barrier(plan.call), memory.views(plan.arithmetic)

    def steps_of(part: Any, number: int) -> list[list[Step]]:
        return _plan_piece(part, views[number], memory.rank, plan.arithmetic, root)

    plans = [steps_of(parts[0], number) for number in range(len(views))] if len(parts) == 1 else []

    def play() -> None:
        for part in parts:
            number = memory.number
            copy_in, reduction, copy_out = plans[number] if plans else steps_of(part, number)
            perform(copy_in)
            barrier()
            perform(reduction)
            barrier()
            perform(copy_out)

    return play


def _plan_piece(
    part: Any, slots: Sequence[Any], rank: int, arithmetic: Arithmetic, root: int | None
) -> list[list[Step]]:
    """Return the steps of this rank before, between and after the two barriers of a piece."""
    size = len(slots)
    segments = [slice(*bounds(len(part), size, one)) for one in range(size)]
    own, others, entry = segments[rank], [one for one in range(size) if one != rank], slots[rank]
    sources = [part[own] if one == rank else slot[own] for one, slot in enumerate(slots)]
    into = part[own] if root in (None, rank) else entry[own]
    readers = others if root is None else {root} - {rank}
    return [
        [arithmetic.copy(entry[segments[one]], part[segments[one]]) for one in others],
        [
            *arithmetic.reduce(sources, into, sources[0]),
            *(arithmetic.copy(slots[one][own], into) for one in readers),
        ],
        [arithmetic.copy(part[segments[one]], entry[segments[one]]) for one in others if root in (None, rank)],
    ]


def reduce_scatter_by_slots(memory: NodeMemory, plan: Plan, payload: Any, shard: Any) -> None:
    """Reduce all ranks' `payload`; this rank's chunk goes into `shard`, which may be that chunk of the payload."""
    arithmetic, rank, size = plan.arithmetic, memory.rank, memory.size
    stride = memory.slot // (size * plan.dtype.itemsize)  # elements of a slot that are there for each chunk
    whole = cut(len(payload), size, stride, chunk_major=True)
    start, _ = bounds(len(payload), size, rank)
    for piece in range(whole.pieces):
        slots = memory.views(arithmetic)[memory.number]
        for chunk in range(size):
            if chunk != rank:
                part = payload[whole.region(piece, chunk)]
                perform([arithmetic.copy(slots[rank][chunk * stride : chunk * stride + len(part)], part)])
        memory.signals.barrier(plan.call)
        where = whole.region(piece, rank)
        mine, first = payload[where], rank * stride
        sources = [slot[first : first + len(mine)] for slot in slots]
        sources[rank] = mine
        perform(arithmetic.reduce(sources, shard[where.start - start : where.stop - start], sources[0]))
