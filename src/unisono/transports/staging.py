"""Collectives within one node for tensors in any memory, through slots in a shared window: reductions, and transfers
with one copy in and one copy out.

    flat             copy in, barrier, each rank reduces all slots                      1 barrier, p x n read by each
    reduce           copy the others' segments in, barrier, reduce the own, barrier, copy out     2 barriers a piece

                     rank 0's slot   | ...... | B0 | C0 |        rank 1 reduces B0, its own B and B2, and writes the
                     rank 1's slot   | A1 | ...... | C1 |        result over B0 and B2: each rank finds all results in
                     rank 2's slot   | A2 | B2 | ...... |        its own slot. The lines that carried the terms carry
                                                                the result: one line changes caches twice, where a
                                                                result in a slot of its own moves two lines twice
    reduce_scatter   copy the others' chunks in, barrier, reduce the own chunk of all slots       1 barrier a piece

    all_gather       copy the own part in, barrier, copy the others' out                1 barrier a piece
    broadcast        the root copies in, barrier, the others copy out                   1 barrier a piece
    all_to_all_v     an all_gather of all sizes; then what a rank sends is a stream that goes through its slot:

                rank 0 of 3   | to 1 ..... | to 2 ....... |
                rank 1        | to 2 .. | to 0 .......... |                           1 barrier a piece
                rank 2        | to 0 .......... | to 1 .. |
                     cut into pieces ─┴─

Each rank begins with the next one, so that no rank is the first of all others. Each rank sees all sent and all expected
sizes: if two differ, all ranks raise the same error. A rank reads its own contribution to a sum directly from the
tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from unisono.call import Call
from unisono.errors import MismatchError
from unisono.schedules.pieces import bounds, cut
from unisono.transports.arithmetic import Array
from unisono.transports.messages import size_mismatch
from unisono.transports.node_memory import NodeMemory
from unisono.transports.plan import Plan, Play, Prepared
from unisono.transports.signals import INLINE_BYTES
from unisono.transports.steps import Rounds, Row, copy, kind_of, longer_player_of, player_of, reduction


def flat_allreduce(memory: NodeMemory, plan: Plan, _: object) -> Prepared:
    """Prepare the allreduce of `flat`, in parts that fit a slot."""

    def at(address: int, _: int) -> Play:
        starts = range(0, max(1, plan.nbytes), memory.slot)
        plays = [_flat(memory, plan, address + start, min(memory.slot, plan.nbytes - start)) for start in starts]
        if len(plays) == 1:
            return plays[0]

        def play() -> None:
            for part in plays:
                part()

        return play

    return at


def _flat(memory: NodeMemory, plan: Plan, address: int, nbytes: int) -> Play:
    """Return the reduction of `nbytes` bytes, at most a slot. The shortest travel beside the tokens of the barrier."""
    assert plan.op is not None, "a reduction"
    slot_sets = memory.signals.inline_addresses if nbytes <= INLINE_BYTES else memory.addresses
    kind, length = kind_of(plan.dtype, plan.reduction), nbytes // plan.dtype.itemsize
    programs = [
        [[copy(slots[memory.rank], address, nbytes)], reduction(kind, address, slots, length)] for slots in slot_sets
    ]
    return player_of(memory.signals, plan.call, programs, plan.arithmetic)


def staged_reduce(memory: NodeMemory, plan: Plan, address: int, root: int | None = None) -> Play:
    """Return a function that reduces the payload at `address`, in place: on `root`, or if None on all ranks.

    Every rank reduces its segment of each piece.
    """
    assert plan.op is not None, "a reduction"
    size, rank, itemsize = memory.size, memory.rank, plan.dtype.itemsize
    kind, others = kind_of(plan.dtype, plan.reduction), _after(rank, size)
    receives = root in (None, rank)
    readers = others if root is None else [root] if root != rank else []
    pieces = cut(plan.length, 1, memory.piece // itemsize // plan.grain * plan.grain).pieces

    def rounds_from(first: int) -> Rounds:
        rounds: list[list[Row]] = [[]]
        for piece in range(pieces):
            slots = memory.addresses[(first + 2 * piece) % len(memory.addresses)]  # two barriers a piece
            begin, end = bounds(plan.length, pieces, piece, plan.grain)
            ends = [itemsize * bounds(end - begin, size, index, plan.grain)[0] for index in range(size + 1)]
            part, start, count = address + itemsize * begin, ends[rank], (ends[rank + 1] - ends[rank]) // itemsize
            into = (part if receives else slots[rank]) + start
            sources = [part + start if index == rank else slots[index] + start for index in range(size)]
            rounds[-1] += _segments(slots[rank], part, ends, others)
            rounds.append(reduction(kind, into, sources, count))
            rounds[-1] += [copy(slots[reader] + start, into, count * itemsize) for reader in readers]
            rounds.append(_segments(part, slots[rank], ends, others if receives else []))
        return rounds

    if pieces == 1:
        programs = [rounds_from(first) for first in range(len(memory.addresses))]
        return player_of(memory.signals, plan.call, programs, plan.arithmetic)
    return longer_player_of(memory.signals, plan.call, rounds_from, len(memory.addresses), plan.arithmetic)


def _segments(into: int, source: int, ends: Sequence[int], ranks: Sequence[int]) -> list[Row]:
    return [copy(into + ends[rank], source + ends[rank], ends[rank + 1] - ends[rank]) for rank in ranks]


def staged_reduce_scatter(memory: NodeMemory, plan: Plan, payload: int, shard: int) -> Play:
    """Return a function that reduces all ranks' payloads; the own chunk goes to `shard`, which may be its place."""
    assert plan.op is not None, "a reduction"
    size, rank, itemsize, kind = memory.size, memory.rank, plan.dtype.itemsize, kind_of(plan.dtype, plan.reduction)
    stride = memory.piece // (size * itemsize)  # elements of a slot that are there for each chunk
    cuts = cut(plan.length, size, stride, chunk_major=True)
    begin, _ = bounds(plan.length, size, rank)

    def rounds_from(first: int) -> Rounds:
        rounds: list[list[Row]] = [[]]
        for piece in range(cuts.pieces):
            slots = memory.addresses[(first + piece) % len(memory.addresses)]
            for chunk in _after(rank, size):
                where = cuts.region(piece, chunk)
                into, source = slots[rank] + chunk * stride * itemsize, payload + where.start * itemsize
                rounds[-1].append(copy(into, source, (where.stop - where.start) * itemsize))
            where = cuts.region(piece, rank)
            sources = [slot + rank * stride * itemsize for slot in slots]
            sources[rank] = payload + where.start * itemsize
            into = shard + (where.start - begin) * itemsize
            rounds.append(reduction(kind, into, sources, where.stop - where.start))
        return rounds

    return longer_player_of(memory.signals, plan.call, rounds_from, len(memory.addresses), plan.arithmetic)


class StreamPart(NamedTuple):
    """Part of the stream of bytes that a rank sends, or receives of another rank's stream."""

    first: int
    """Bytes before it in the stream."""
    address: int
    nbytes: int
    rank: int = -1
    """Rank that sends the stream in which it is received."""


def staged_all_gather(memory: NodeMemory, call: Call, parts: Sequence[tuple[int, int]]) -> Play:
    """Return a function that copies parts[r], its address and its bytes, of rank r to all ranks."""
    stream = [StreamPart(0, *parts[memory.rank])]
    received = [StreamPart(0, *parts[rank], rank) for rank in _after(memory.rank, memory.size)]
    return _streamed(memory, call, stream, received, max(nbytes for _, nbytes in parts))


def staged_broadcast(memory: NodeMemory, plan: Plan, _: int, address: int) -> Play:
    """Return a function that copies the root's payload into that of all ranks: it writes each piece once."""
    part, at_root = StreamPart(0, address, plan.nbytes, plan.root), memory.rank == plan.root
    return _streamed(memory, plan.call, [part] if at_root else [], [] if at_root else [part], plan.nbytes)


def staged_all_to_all(memory: NodeMemory, plan: Plan, sends: int, receives: int) -> Play:
    """Return a function that sends row d at `sends` to rank d, and fills row s at `receives` from rank s."""
    rank, size = memory.rank, memory.size
    nbytes = plan.nbytes // size
    stream = [
        StreamPart(index * nbytes, sends + peer * nbytes, nbytes) for index, peer in enumerate(_after(rank, size))
    ]
    received = [
        StreamPart((rank - source - 1) % size * nbytes, receives + source * nbytes, nbytes, source)
        for source in reversed(_after(rank, size))
    ]
    own_chunk = copy(receives + rank * nbytes, sends + rank * nbytes, nbytes)
    return _streamed(memory, plan.call, stream, received, (size - 1) * nbytes, [own_chunk])


def all_to_all_v(memory: NodeMemory, call: Call, sends: Sequence[Array], receives: Sequence[Array]) -> None:
    """Send sends[d] to rank d, and fill receives[s] from rank s.

    Raises MismatchError on every rank if a rank sends another length than the receiver expects.
    """
    rank, size = memory.rank, memory.size
    sizes = np.empty((size, 2, size), np.int64)
    sizes[rank] = [len(part) for part in sends], [len(part) for part in receives]
    staged_all_gather(memory, call, [(of_rank.ctypes.data, of_rank.nbytes) for of_rank in sizes])()
    outgoing, incoming = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    _compare(memory, call, outgoing, incoming)

    def bytes_before(source: int) -> int:
        """Return the bytes of a source's stream before those for this rank."""
        return sum(outgoing[source][peer] for peer in _after(source, size)[: (rank - source - 1) % size])

    stream = list(_laid([sends[peer] for peer in _after(rank, size)]))
    received = [
        StreamPart(bytes_before(source), receives[source].ctypes.data, len(receives[source]), source)
        for source in reversed(_after(rank, size))
    ]
    longest = max(sum(row) - row[source] for source, row in enumerate(outgoing))
    if longest:
        _streamed(memory, call, stream, received, longest)()
    receives[rank][:] = sends[rank]


def _streamed(
    memory: NodeMemory,
    call: Call,
    stream: Sequence[StreamPart],
    received: Sequence[StreamPart],
    longest: int,
    local: Sequence[Row] = (),
) -> Play:
    """Return a function by which the streams of all ranks go through their slots, piece by piece.

    The longest stream of all ranks has `longest` bytes. `local` are copies that no other rank takes part in.
    """

    def rounds_from(slot_index: int) -> Rounds:
        rounds = [list(local)]
        for start in range(0, max(1, longest), memory.piece):
            slots, stop = memory.addresses[slot_index], start + memory.piece
            slot_index = (slot_index + 1) % len(memory.addresses)
            for first, address, nbytes, _ in stream:
                low, high = max(start, first), min(stop, first + nbytes)
                if low < high:
                    rounds[-1].append(copy(slots[memory.rank] + low - start, address + low - first, high - low))
            rounds.append([])
            for first, address, nbytes, source in received:
                low, high = max(start, first), min(stop, first + nbytes)
                if low < high:
                    rounds[-1].append(copy(address + low - first, slots[source] + low - start, high - low))
        return rounds

    return longer_player_of(memory.signals, call, rounds_from, len(memory.addresses))


def _compare(
    memory: NodeMemory, call: Call, outgoing: Sequence[Sequence[int]], incoming: Sequence[Sequence[int]]
) -> None:
    """Raise MismatchError unless outgoing[s][d] (bytes s sends d) equals incoming[d][s] (bytes d expects of s)."""
    if [tuple(row) for row in outgoing] == list(zip(*incoming, strict=True)):
        return
    every_rank, ranks = range(memory.size), memory.signals.ranks
    source, target = next((s, d) for s in every_rank for d in every_rank if outgoing[s][d] != incoming[d][s])
    sent, expected = outgoing[source][target], incoming[target][source]
    raise MismatchError(size_mismatch(call.description, ranks[source], ranks[target], sent, expected))


def _laid(parts: Sequence[Array]) -> Iterator[StreamPart]:
    """Yield arrays as parts of one stream."""
    first = 0
    for part in parts:
        yield StreamPart(first, part.ctypes.data, len(part))
        first += len(part)


def _after(rank: int, size: int) -> list[int]:
    """Return the other ranks, beginning with the one after `rank`."""
    return [*range(rank + 1, size), *range(rank)]
