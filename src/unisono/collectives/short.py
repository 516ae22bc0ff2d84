"""Short collectives across nodes, through sockets of the group: a program of messages, played by compiled code.

    first short call    connect │ barriers by sockets, by the MPI library, by turns │ the faster, for all short calls
    later calls         | token | payload | between the ranks of a schedule's program

So a fast network goes by the library, which knows it, and Ethernet by sockets. A message of another call is found by
its token. In a broadcast or a reduce some ranks wait for nobody: their mistake is found in the next call, and named
there, because every rank keeps the words of its last calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from unisono.call import Call, call_of
from unisono.mpi import MPI
from unisono.schedules import find
from unisono.schedules.pieces import Cut, bounds
from unisono.schedules.schedule import Program
from unisono.transports.arithmetic import Arithmetic, Array, arithmetic_of
from unisono.transports.messages import wait_until
from unisono.transports.plan import Plan, Prepared, started
from unisono.transports.sockets import VARIABLE, Payload, Sockets, StagedParts, landing_bytes, open_sockets, rows_of
from unisono.transports.steps import Row, RowKind, copy, kind_of

if TYPE_CHECKING:
    from unisono.collectives.group import Group

MAX_SHORT_BYTES = 64 << 10
"""Largest payload in bytes: longer ones are cut into pieces, which messages of MPI carry as fast."""

MAX_TREE_BYTES = 2 << 10
"""Largest payload in bytes of an allreduce whose time is that of its messages, not that of its bytes."""

ROUNDS, CALLS = 3, 8
"""Rounds of so many barriers by sockets, and by the library, of which the fastest are compared."""

MAX_TIMES_LIBRARY = 1.5
"""Times of a barrier by sockets and by the library that are as good: beside the library's calls, all are compared."""

CALLS_NAMED = 8
"""Recent calls that two ranks compare when a message does not match: the mistake may lie a few calls back."""

TOKENS = 1 << 64

ALIGNMENT = 64
"""Bytes; what is received begins at a multiple of them."""

BARRIER = "tree"
"""Schedule of a barrier, an allreduce without a payload."""


def schedule_for(collective: str, nbytes: int) -> str:
    """Return the schedule of a short collective: few messages, since each costs more than its bytes.

    >>> schedule_for("allreduce", 4), schedule_for("allreduce", 32 << 10), schedule_for("all_gather", 4)
    ('tree', 'circulant', 'circulant')
    """
    if collective == "all_to_all":
        return "direct"
    whole = collective in ("allreduce", "broadcast", "reduce")
    return "tree" if whole and nbytes <= MAX_TREE_BYTES else "circulant"


def open_short(group: Group) -> Short | None:
    """Connect the ranks of a group; they call it together. Return None on all where the MPI library is as fast."""
    sockets = open_sockets(group.comm)
    if sockets is None:
        return None
    short = Short(group, sockets)
    if short.is_faster_than_library():
        return short
    sockets.close()
    return None


class Short:
    """Short collectives of one group through its sockets."""

    def __init__(self, group: Group, sockets: Sockets) -> None:
        self._group, self._sockets = group, sockets
        program = find(BARRIER, group.placement).allreduce(group.rank, group.size)
        nothing = Payload(0, Cut(0, program.chunks, 1), arithmetic_of(torch.uint8), RowKind.OTHER)
        rows = [*rows_of(group.rank, program, nothing, 0)]
        self._barrier = self._player_of(rows, StagedParts(0, 0, 0, 0), nothing.arithmetic)

    def end(self) -> None:
        """End the connections, from any thread: waits of this rank and of others find out."""
        self._sockets.end()

    def close(self) -> None:
        """Close the sockets. All ranks call it together."""
        self._sockets.close()

    def is_faster_than_library(self) -> bool:
        """Return True on all ranks if a barrier by sockets is faster than the library's. They call it together."""
        comm = self._group.comm
        taken = np.empty((ROUNDS, 2))
        for number in range(ROUNDS):
            for kind, start in enumerate((lambda: self._barrier(0, 0, 0), comm.Barrier)):
                begun = time.perf_counter()
                for _ in range(CALLS):  # back to back: ranks leave a barrier of the other kind at other moments
                    start()
                taken[number, kind] = time.perf_counter() - begun
        ours, theirs = taken.min(axis=0)
        slowest = np.array([0.0 if os.environ.get(VARIABLE) == "on" else ours, theirs])
        comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        return bool(slowest[0] < MAX_TIMES_LIBRARY * slowest[1])

    def barrier(self, call: Call) -> None:
        """Wait until all ranks have entered the call that this one has entered. Raises MismatchError on every rank."""
        self._barrier(self._token(call), 0, 0)

    def prepare(self, plan: Plan) -> Prepared:
        """Prepare a plan of this transport."""
        group, calls, words = self._group, self._group.calls, plan.call.words
        program = group.plans.program(group.plans.schedule(plan))
        memory, ends, rows = placed_rows(plan, program, group.rank, group.size)
        player = self._player_of(rows, ends, plan.arithmetic)

        def start(source: int, target: int, _: object = memory) -> None:
            outer = calls.begin(words + group.label, in_library=False)
            try:
                player(self._token(plan.call), source, target)
            except BaseException:  # whatever it is, the messages of the call may be anywhere
                group.broken = True
                raise
            finally:
                calls.end(outer)

        return started(start)

    def _token(self, call: Call) -> int:
        """Return the number that is equal on all ranks in the same call."""
        label = self._group.label
        number = call_of(call.words + label).number if label else call.number
        return (number + self._group.calls.number) % TOKENS

    def _player_of(
        self, rows: Sequence[Row], parts: StagedParts, arithmetic: Arithmetic
    ) -> Callable[[int, int, int], None]:
        return self._sockets.player_of(rows, parts, arithmetic, self._late, self._raise_mismatch)

    def _late(self) -> None:
        self._group.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # others may need MPI's progress
        self._group.check()

    def _raise_mismatch(self, rank: int) -> None:
        """Raise MismatchError, once this rank or the other one knows in which call they differ."""
        group = self._group
        assert group.watch is not None, "a group of several ranks has a watch"
        group.watch.compare_calls(group.calls, rank, CALLS_NAMED)
        wait_until(lambda: None, group.check)


def placed_rows(plan: Plan, program: Program, rank: int, ranks: int) -> tuple[Array, StagedParts, list[Row]]:
    """Return the rows of a plan's program, the memory that they name, and its ends.

    collective       input                      output
    allreduce        all                        all
    reduce_scatter   all                        the rank's chunk
    all_gather       the rank's chunk           all
    broadcast        all, of the root           all, of others
    reduce           all                        all, of the root
    all_to_all       the first half             the second half: it is a row of 2p chunks
    """
    collective, itemsize, nbytes = plan.collective, plan.dtype.itemsize, plan.nbytes
    halves = 2 if collective == "all_to_all" else 1
    cut = Cut(halves * plan.length, program.chunks, 1)
    payload_bytes = -(-halves * nbytes // ALIGNMENT) * ALIGNMENT
    memory = np.empty(payload_bytes + landing_bytes(program, cut, itemsize), np.uint8)
    first = memory.ctypes.data
    begin, end = (itemsize * bound for bound in bounds(plan.length, ranks, rank))
    chunk, whole, none = (first + begin, end - begin), (first, nbytes), (first, 0)
    is_root = rank == plan.root
    ends = {
        "reduce_scatter": (whole, chunk),
        "all_gather": (chunk, whole),
        "broadcast": (whole, none) if is_root else (none, whole),
        "reduce": (whole, whole if is_root else none),
        "all_to_all": (whole, (first + nbytes, nbytes)),
    }
    payload = Payload(first, cut, plan.arithmetic, kind_of(plan.dtype, plan.op or "sum"))
    rows = [*rows_of(rank, program, payload, first + payload_bytes)]
    if halves == 2:
        rows.append(copy(first + nbytes + begin, first + begin, end - begin))
    source, target = ends.get(collective, (whole, whole))
    return memory, StagedParts(*source, *target), rows
