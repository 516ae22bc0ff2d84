"""Collectives across nodes through sockets of the group: a program of messages, played by compiled code.

    first call     connect │ barriers of few messages, of few rounds, by the MPI library, by turns │ the fastest
    later calls    | token | payload | between the ranks of a schedule's program

They are the short ones, all broadcasts, compiled reductions to a root and all-to-alls, and, between nodes of one rank,
long ones of SEGMENTED schedules. On a fast network the library, which knows it, is faster; on Ethernet sockets are: by
few messages where ranks share cores, or there are many of them, by few rounds where each has a core, and a round takes
as long as several messages. Compiled code plays long ones with a third of the processor time of messages of MPI, by
which Python waits, and with its lock free for the training beside.

A message of another call is found by its token. In a broadcast or a reduce some ranks wait for nobody: their mistake is
found in the next call that reads from them, and named there, because every rank keeps its last calls' descriptions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from unisono.call import BARRIER, Call, labelled
from unisono.collectives.prepare import is_overwritten
from unisono.collectives.trials import choices_file, keep_choice, read_choices
from unisono.mpi import MPI
from unisono.placement import Placement
from unisono.schedules import find
from unisono.schedules.pieces import Cut, bounds, cut_program
from unisono.schedules.schedule import Program
from unisono.transports.arithmetic import Arithmetic, Array, arithmetic_of
from unisono.transports.compiled import compiled
from unisono.transports.messages import wait_until
from unisono.transports.plan import Plan, Prepared, bytes_at, started
from unisono.transports.sockets import SOURCE, TARGET, VARIABLE, Payload, Sockets, landing_bytes, open_sockets, rows_of
from unisono.transports.steps import Row, RowKind, copy, kind_of
from unisono.wires import EXACT

if TYPE_CHECKING:
    from unisono.collectives.group import Group

PlayAt = Callable[[int, int], None]
"""Function of a source and a target address."""

MAX_SHORT_BYTES = 64 << 10
"""Largest payload in bytes of every collective."""

ROOTED = ("broadcast", "reduce")
LONG_COLLECTIVES = (*ROOTED, "all_to_all")
"""Collectives whose longer payloads go by a schedule of their own (`schedule_for`)."""

SEGMENTED = {"ring": 2, "direct": 2, "circulant": 2, "halving": 1}
"""Schedules of longer payloads of the others, whose rounds keep all links busy, and their pieces: two where both
ends of a message have the same round, so that one is on its way while ranks wait for each other with the other."""

CHAIN = "pipeline"
"""Schedule of a long broadcast or reduction."""

PIECES_PER_RANK, MAX_PIECES, MIN_PIECE_BYTES = 16, 256, 8 << 10
"""Pieces of a chain: it takes as long as its pieces and its ranks one after another."""

MIN_CHUNK_BYTES = 64 << 10
"""Least size of chunks that are cut in pieces."""

MAX_TREE_BYTES = 2 << 10
"""Largest payload in bytes whose time is that of its messages, not that of its bytes."""

MAX_STAR_BYTES = 512
"""Most bytes that the root of a reduction receives from all others at once: then no rank but the root waits."""

MAX_SPLIT_BYTES = 4 << 10
"""Largest payload in bytes that goes by a split tree: half of the messages of a circulant, and some more bytes."""

MAX_FLAT_BYTES = 8 << 10
"""Most bytes that a rank sends to all others for the sake of few rounds: a link of 1 Gbit/s takes 65 us for them, the
rounds of a tree that they save take some 20 us each."""

MAX_HANDED_ON_BYTES = 256
"""Largest chunk in bytes that an all_to_all hands on, so that it takes few messages."""

ROUNDS, CALLS = 3, 8
"""Rounds of so many barriers of each kind, of which the fastest are compared."""

MAX_TIMES_LIBRARY = 1.5
"""Times of a barrier by sockets and by the library that are as good: beside the library's calls, all are compared."""

MAX_TIMES_FEW_MESSAGES = 0.9
"""Times of a barrier of few rounds and of few messages at which rounds count: below, it is no chance."""

CALLS_NAMED = 8
"""Recent calls that two ranks compare when a message does not match: the mistake may lie a few calls back."""

ANSWERS = ["library"], ["sockets"], ["sockets", "few rounds"]
"""Values of the answer in the file of this machine's choices."""

BY_LIBRARY, FEW_MESSAGES, FEW_ROUNDS = range(len(ANSWERS))
"""Places of the answers."""

TOKENS = 1 << 64

ALIGNMENT = 64
"""Bytes; what is received begins at a multiple of them."""


def entry_of(nodes: int) -> str:
    """Return the key of the answer in that file: ranks that share cores have another one."""
    return f"short calls between {nodes} nodes"


def goes_by_sockets(plan: Plan, placement: Placement, tuned: bool) -> bool:
    """Return True for a plan that goes by the schedule of `schedule_for`, or an exact sum's own: short ones and those
    of one root, whatever a table of schedules timed as messages has, and where none was `tuned` all that sockets carry.
    """
    if plan.nbytes <= MAX_SHORT_BYTES:
        return plan.nbytes > 0
    free = not tuned and (plan.collective in LONG_COLLECTIVES or _is_between_nodes(plan, placement))
    return (free or plan.collective in ROOTED) and _is_compiled(plan)


def takes_segments(plan: Plan, placement: Placement) -> bool:
    """Return True for a longer payload that goes by its own schedule, in segments."""
    long = plan.nbytes > MAX_SHORT_BYTES and plan.collective not in ROOTED
    return long and plan.algorithm in SEGMENTED and _is_between_nodes(plan, placement) and _is_compiled(plan)


def _is_between_nodes(plan: Plan, placement: Placement) -> bool:
    """Return False where a node has several ranks, whose messages to each other go through its memory, or for a wire
    that Python encodes."""
    return plan.transport == "messages" and placement.ranks == len(placement.nodes) and plan.wire in (None, EXACT)


def _is_compiled(plan: Plan) -> bool:
    """Return False for a reduction in Python, each play of which would keep memory of the payload's size."""
    return plan.op is None or kind_of(plan.dtype, plan.reduction) is not RowKind.OTHER


def schedule_for(collective: str, nbytes: int, ranks: int, few_rounds: bool = False) -> str:
    """Return the schedule of a collective: few messages for a short payload, since each costs more than its bytes.

    `few_rounds`: or few rounds, since each costs more than some messages. A barrier is an allreduce of 0 bytes.

    >>> schedule_for("allreduce", 4, 8), schedule_for("reduce", 4, 8), schedule_for("all_gather", 4, 8)
    ('tree', 'tree/star', 'circulant')
    >>> schedule_for("broadcast", 100_000, 8), schedule_for("allreduce", 100_000, 8)
    ('pipeline', 'circulant')
    >>> schedule_for("broadcast", 4096, 6), schedule_for("allreduce", 4096, 8), schedule_for("allreduce", 4096, 6)
    ('split_tree', 'split_tree', 'circulant')
    >>> schedule_for("allreduce", 4, 8, few_rounds=True), schedule_for("all_to_all", 32, 8, few_rounds=True)
    ('flat', 'direct')
    """
    short = nbytes <= MAX_TREE_BYTES
    if collective == "all_to_all":
        return "circulant" if short and nbytes <= MAX_HANDED_ON_BYTES * ranks and not few_rounds else "direct"
    if nbytes > MAX_SHORT_BYTES:
        return CHAIN if collective in LONG_COLLECTIVES else "circulant"
    if collective == "allreduce" and few_rounds and nbytes * (ranks - 1) <= MAX_FLAT_BYTES:
        return "flat"
    if collective == "reduce" and nbytes * (ranks - 1) <= MAX_STAR_BYTES:
        return "tree/star"
    if short and collective in ("broadcast", "reduce", "allreduce"):
        return "tree" if collective == "allreduce" else "tree/binary"
    splits = collective in ("broadcast", "reduce") or (collective == "allreduce" and not ranks & (ranks - 1))
    return "split_tree" if splits and nbytes <= MAX_SPLIT_BYTES else "circulant"


def answer_for(few_messages: float, few_rounds: float, library: float) -> int:
    """Return the place of the answer for the seconds of barriers of each kind.

    >>> answer_for(20e-6, 19e-6, 15e-6), answer_for(20e-6, 10e-6, 9e-6), answer_for(20e-6, 10e-6, 5e-6)
    (1, 2, 0)
    """
    if min(few_messages, few_rounds) >= MAX_TIMES_LIBRARY * library:
        return BY_LIBRARY
    return FEW_ROUNDS if few_rounds < MAX_TIMES_FEW_MESSAGES * few_messages else FEW_MESSAGES


def open_socket_calls(group: Group) -> SocketCalls | None:
    """Connect the ranks of a group; they call it together. Return None on all where the MPI library is as fast.

    The answer is kept in the file of this machine's choices: sums have other orders, and later runs have the bits of
    this one.
    """
    if (sockets := open_sockets(group.comm)) is None:
        return None
    few_messages, few_rounds = (SocketCalls(group, sockets, fewer_rounds) for fewer_rounds in (False, True))
    path, entry = choices_file(group.size, reads=False, compiled=True), entry_of(len(group.placement.nodes))
    kept = read_choices(path).get(entry) if group.rank == 0 else None
    known = np.array([ANSWERS.index(kept) if kept in ANSWERS else -1, os.environ.get(VARIABLE) == "on"], np.int64)
    group.comm.Allreduce(MPI.IN_PLACE, known, MPI.MAX)
    answer, forced = int(known[0]), bool(known[1])
    if answer < 0 and not forced:
        answer = measure(group.comm, few_messages, few_rounds)
        if group.rank == 0:  # a group that has measured at the same time may have kept another
            answer = ANSWERS.index(keep_choice(path, entry, kept, ANSWERS[answer]))
        answer = group.comm.bcast(answer)
    if answer == BY_LIBRARY and not forced:
        sockets.close()
        return None
    return few_rounds if answer == FEW_ROUNDS else few_messages


def measure(comm: MPI.Intracomm, few_messages: SocketCalls, few_rounds: SocketCalls) -> int:
    """Return the place of the answer, by barriers of each kind."""
    taken = np.empty((ROUNDS, len(ANSWERS)))
    kinds = (lambda: few_messages.bare_barrier(0, 0, 0), lambda: few_rounds.bare_barrier(0, 0, 0), comm.Barrier)
    for round_index in range(ROUNDS):
        for kind, start in enumerate(kinds):
            begun = time.perf_counter()
            for _ in range(CALLS):  # back to back: ranks leave a barrier of the other kind at other moments
                start()
            taken[round_index, kind] = time.perf_counter() - begun
    slowest = taken.min(axis=0)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return answer_for(*map(float, slowest))


class SocketCalls:
    """Collectives of one group through its sockets."""

    def __init__(self, group: Group, sockets: Sockets, few_rounds: bool) -> None:
        self._group, self.sockets, self._few_rounds = group, sockets, few_rounds
        self._landing = empty(0)
        schedule = find(schedule_for("allreduce", 0, group.size, few_rounds), group.placement)
        program = schedule.allreduce(group.rank, group.size)
        nothing = Payload((0,), Cut(0, program.chunks, 1), arithmetic_of(torch.uint8), RowKind.OTHER)
        self.bare_barrier = self._player_of([*rows_of(group.rank, program, nothing, 0)], nothing.arithmetic)
        """Barrier of a token, which is not recorded."""
        self.plain_barrier = self._recorded(self.bare_barrier, BARRIER)
        """Barrier that is no part of another call; its addresses are not used."""

    def schedule_for(self, plan: Plan) -> str:
        """Return the schedule of a collective, by what a round costs here beside a message."""
        return schedule_for(plan.collective, plan.nbytes, self._group.size, self._few_rounds)

    def barrier(self, call: Call) -> None:
        """Wait until all ranks have entered the call that this one has entered. Raises MismatchError on every rank."""
        self.bare_barrier(self._token(call), 0, 0)

    def prepare(self, plan: Plan) -> Prepared:
        group = self._group
        program = group.plans.program(group.plans.schedule(plan))
        allocate = self._shared if plan.nbytes > MAX_SHORT_BYTES else empty
        memory, rows = placed_rows(plan, program, group.rank, group.size, allocate)
        start = self._recorded(self._player_of(rows, plan.arithmetic), plan.call, memory)
        if not (is_overwritten(plan, group.rank) and plan.nbytes > MAX_SHORT_BYTES):
            return started(start)
        begin, end = (plan.dtype.itemsize * bound for bound in bounds(plan.length, group.size, group.rank))

        def start_on_scratch(source: int, target: int) -> None:
            scratch = empty(plan.nbytes)  # for this call alone: it would stay as long as the plan
            start(source, scratch.ctypes.data)
            if plan.collective == "reduce_scatter":
                bytes_at(target, end - begin)[:] = scratch[begin:end]

        return started(start_on_scratch)

    def _shared(self, nbytes: int) -> Array:
        """Return memory that all long calls of the group use, one after another: of its own, each plan would keep as
        much as it receives at once."""
        if len(self._landing) < nbytes:
            self._landing = empty(max(nbytes, 2 * len(self._landing)))
        return self._landing

    def _recorded(self, player: Callable[[int, int, int], None], call: Call, *memory: Array) -> PlayAt:
        """Return the function that carries out a call by `player`, which reads `memory`, and records it."""
        group, calls, (description, digest) = self._group, self._group.calls, call

        def start(source: int, target: int, _: object = memory) -> None:
            label = group.label
            outer = calls.begin(description + label if label else description, False)
            try:
                player(self._token(call) if label else digest + calls.number, source, target)
            except BaseException:  # whatever it is, the messages of the call may be anywhere
                group.broken = True
                raise
            finally:
                calls.end(outer)

        return compiled.make_socket_call(player, start, group, calls, description, digest)  # type: ignore[no-any-return]

    def _token(self, call: Call) -> int:
        """Return the number that is equal on all ranks in the same call."""
        return (labelled(call, self._group.label).digest + self._group.calls.number) % TOKENS

    def _player_of(self, rows: Sequence[Row], arithmetic: Arithmetic) -> Callable[[int, int, int], None]:
        return self.sockets.player_of(rows, arithmetic, self._late, self._raise_mismatch)

    def _late(self) -> None:
        self._group.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # others may need MPI's progress
        self._group.check()

    def _raise_mismatch(self, rank: int) -> None:
        """Raise MismatchError, once this rank or the other one knows in which call they differ."""
        group = self._group
        assert group.watch is not None, "a group of several ranks has a watch"
        group.watch.compare_calls(group.calls, rank, CALLS_NAMED)
        wait_until(lambda: None, group.check)


def empty(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


def placed_rows(
    plan: Plan, program: Program, rank: int, ranks: int, allocate: Callable[[int], Array] = empty
) -> tuple[Array, list[Row]]:
    """Return the rows of a plan's program, and the memory that they name beside a call's source and target.

    allreduce, broadcast, all_gather     in the target, which has the rank's contribution
    reduce on a leaf, reduce_scatter     in scratch memory: partial sums overwrite what they are made of
    long ones of these                   in the target, scratch memory of the call
    all_to_all                           from the source to the target; in scratch memory what is handed on
    reductions that are not compiled     in scratch memory, at whose addresses Python prepares them
    """
    collective, itemsize, nbytes = plan.collective, plan.dtype.itemsize, plan.nbytes
    kind = kind_of(plan.dtype, plan.reduction)
    loses = is_overwritten(plan, rank)
    needs_scratch = (plan.op is not None and kind is RowKind.OTHER) or (loses and nbytes <= MAX_SHORT_BYTES)
    begin, end = (itemsize * bound for bound in bounds(plan.length, ranks, rank))
    if collective == "all_to_all":
        parts = program.chunks // ranks
        memory = empty((parts - 2) * nbytes)
        addresses = (SOURCE, TARGET, *range(memory.ctypes.data, memory.ctypes.data + memory.size, max(1, nbytes)))
        payload = Payload(addresses, Cut(parts * plan.length, program.chunks, 1), plan.arithmetic, kind)
        own_chunk = copy(TARGET + begin, SOURCE + begin, end - begin)
        return memory, [*rows_of(rank, program, payload, 0), own_chunk]
    payload = Payload((TARGET,), _cut(plan, program, ranks), plan.arithmetic, kind)
    scratch_bytes = -(-nbytes // ALIGNMENT) * ALIGNMENT if needs_scratch else 0
    memory = allocate(scratch_bytes + landing_bytes(program, payload))
    first = memory.ctypes.data
    if not needs_scratch:
        given = [copy(TARGET, SOURCE, nbytes)] if loses else []
        return memory, [*given, *rows_of(rank, program, payload, first)]
    rows = [copy(first, SOURCE, nbytes)]
    rows += rows_of(rank, program, payload._replace(addresses=(first,)), first + scratch_bytes)
    if collective == "reduce_scatter":
        rows.append(copy(TARGET, first + begin, end - begin))
    elif not loses:
        rows.append(copy(TARGET, first, nbytes))
    return memory, rows


def _cut(plan: Plan, program: Program, ranks: int) -> Cut:
    """Return the cut of a payload: a chain has many pieces, longer ones of other schedules two, short ones one."""
    pieces = SEGMENTED.get(plan.algorithm, 1) if plan.nbytes >= program.chunks * MIN_CHUNK_BYTES else 1
    if plan.algorithm == CHAIN:
        largest = max(MIN_PIECE_BYTES, plan.nbytes // min(MAX_PIECES, PIECES_PER_RANK * ranks))
        pieces = -(-plan.nbytes // largest)
    if pieces == 1 or plan.algorithm == CHAIN or plan.grain > 1:
        return Cut(plan.length, program.chunks, pieces, grain=plan.grain)
    by_chunk = plan.collective in ("reduce_scatter", "all_gather")
    return cut_program(program, plan.length, -(-plan.length // (pieces * program.chunks)), by_chunk)
