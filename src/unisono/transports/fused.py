"""Fused forms: whole collectives within one node, in fewer passes over memory than a transport makes.

Each equals one schedule, bit for bit: `FUSED[collective, schedule]`. A test compares them. A reduction goes in place if
the payload is in shared memory. All else goes through slots in a shared window, in pieces, one copy in and one out:

    flat             copy in, barrier, each rank reduces all slots                      1 barrier, p x n read by each:
                                                                                        up to some ten kilobytes
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
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from unisono.call import Call, call_in
from unisono.errors import MismatchError
from unisono.schedules.pieces import bounds, cut
from unisono.schedules.schedule import others
from unisono.transports.arithmetic import Array
from unisono.transports.barriers import INLINE_BYTES
from unisono.transports.messages import size_mismatch
from unisono.transports.node_memory import NodeMemory, SharedMemory
from unisono.transports.plan import Plan, Play, Prepared
from unisono.transports.steps import Rounds, Row, copy, kind_of, longer_player_of, player_of, reduction

BLOCK_BYTES = 64 << 10
"""Bytes summed at a time: by measurement, the sum is then still cached when it is written to the others."""

FindShared = Callable[[int, int], tuple[str, SharedMemory] | None]
"""Function (address, bytes) -> the location in words, which ranks compare, and the shared memory; None elsewhere."""


def flat_allreduce(memory: NodeMemory, plan: Plan, _: object) -> Prepared:
    """Prepare the allreduce of `flat`, in parts that fit a slot. The shortest travel beside the barrier's tokens."""
    slot_sets = memory.signals.inline_addresses if plan.nbytes <= INLINE_BYTES else memory.addresses
    kind, starts = kind_of(plan.dtype, plan.reduction), range(0, max(1, plan.nbytes), memory.slot)

    def at(address: int, _: int) -> Play:
        def rounds_from(first: int) -> Rounds:
            rounds: list[list[Row]] = [[]]
            for part, start in enumerate(starts):
                slots = slot_sets[(first + part) % len(slot_sets)]
                here, nbytes = address + start, min(memory.slot, plan.nbytes - start)
                rounds[-1].append(copy(slots[memory.rank], here, nbytes))
                rounds.append(reduction(kind, here, slots, nbytes // plan.dtype.itemsize))
            return rounds

        return _player(memory, plan, rounds_from, len(slot_sets), len(starts))

    return at


def _player(memory: NodeMemory, plan: Plan, rounds_from: Callable[[int], Rounds], count: int, pieces: int) -> Play:
    """Return the player of one of `count` programs; those of several pieces are made when they are due."""
    if pieces > 1:
        return longer_player_of(memory.signals, plan.call, rounds_from, count, plan.arithmetic)
    return player_of(memory.signals, plan.call, list(map(rounds_from, range(count))), plan.arithmetic)


def staged_reduce(memory: NodeMemory, plan: Plan, address: int, root: int | None = None) -> Play:
    """Return a function that reduces the payload at `address`, in place: on `root`, or if None on all ranks.

    Every rank reduces its segment of each piece.
    """
    assert plan.op is not None, "a reduction"
    size, rank, itemsize = memory.size, memory.rank, plan.dtype.itemsize
    kind, peers = kind_of(plan.dtype, plan.reduction), others(rank, size)
    receives = root in (None, rank)
    readers = peers if root is None else [root] if root != rank else []
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
            rounds[-1] += _segments(slots[rank], part, ends, peers)
            rounds.append(reduction(kind, into, sources, count))
            rounds[-1] += [copy(slots[reader] + start, into, count * itemsize) for reader in readers]
            rounds.append(_segments(part, slots[rank], ends, peers if receives else []))
        return rounds

    return _player(memory, plan, rounds_from, len(memory.addresses), pieces)


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
            for chunk in others(rank, size):
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
    received = [StreamPart(0, *parts[rank], rank) for rank in others(memory.rank, memory.size)]
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
        StreamPart(index * nbytes, sends + peer * nbytes, nbytes) for index, peer in enumerate(others(rank, size))
    ]
    received = [
        StreamPart((rank - source - 1) % size * nbytes, receives + source * nbytes, nbytes, source)
        for source in reversed(others(rank, size))
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
    differing = np.argwhere(sizes[:, 0] != sizes[:, 1].T)  # what s sends to d, and what d expects of s
    if len(differing):
        source, target = differing[0]
        ranks, sent, expected = memory.signals.ranks, outgoing[source][target], incoming[target][source]
        raise MismatchError(size_mismatch(call.description, ranks[source], ranks[target], sent, expected))

    def bytes_before(source: int) -> int:
        """Return the bytes of a source's stream before those for this rank."""
        return sum(outgoing[source][peer] for peer in others(source, size)[: (rank - source - 1) % size])

    parts = [sends[peer] for peer in others(rank, size)]
    firsts = accumulate(map(len, parts), initial=0)
    stream = [StreamPart(first, part.ctypes.data, len(part)) for first, part in zip(firsts, parts, strict=False)]
    received = [
        StreamPart(bytes_before(source), receives[source].ctypes.data, len(receives[source]), source)
        for source in reversed(others(rank, size))
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
