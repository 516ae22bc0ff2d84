"""MPI messages as a channel: nonblocking sends and receives, and waits that leave the core to others.

    SEND       the payload's own memory, or a parcel that the wire has packed
    RECEIVE    into place, or into a parcel that is unpacked when the round ends
    ADD        into a landing place; reduced when the round ends

A tag holds the number of the ticket and what is left of the call's fingerprint: messages of different calls do not
meet, so ranks that disagree wait, and are told so (`watch.py`), instead of summing what does not belong together.

Waiting looks, gives the core away between looks, and after 0.1 ms without news sleeps between them, the longer the
longer it has waited: what a rank computes with, and the ranks that share its cores, need them more.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from unisono.mpi import MPI
from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.player import SPREAD, Move
from unisono.transports.rounds import OpenRound, reduce_arrivals
from unisono.transports.wires import Wire

Result = TypeVar("Result")

PATIENCE = 1e-4
"""Seconds without news after which a wait sleeps between looks."""

NAP = 1e-4
"""Seconds that it sleeps, unless more would not matter."""


def until(look: Callable[[], Result | None], interrupted: Callable[[], None], nap: float = NAP) -> Result:
    """Look until there is something, and return it. `interrupted` is called now and then; it raises to end the wait.

    It sleeps `nap` seconds between two looks at most.
    """
    start = None
    while not (seen := look()):
        now = time.monotonic()
        start = start or now
        if now - start < PATIENCE:
            os.sched_yield()
        else:
            time.sleep(min(nap, max(NAP, nap / 4, (now - start) / 2)))
            interrupted()
    return seen


def wait(request: MPI.Request, interrupted: Callable[[], None]) -> None:
    """Wait for one request."""
    until(request.Test, interrupted)


def tag_of(comm: MPI.Intracomm, fingerprint: int) -> int:
    """The first of the SPREAD tags that the messages of a call have."""
    most: Any = comm.Get_attr(MPI.TAG_UB)
    return int(fingerprint % ((most + 1) // SPREAD) * SPREAD)


class MessageChannel:
    """Carries the moves of one call on a communicator that nothing else uses.

    `memory` holds the payload as bytes, the same bytes that `arithmetic` sees as numbers. `fingerprint` is a number
    that ranks in the same call have in common. `interrupted` is called now and then while waiting; it raises to end it.
    `nap` are the seconds that a wait may oversleep.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: MPI.memory,
        arithmetic: Arithmetic,
        wire: Wire | None = None,
        fingerprint: int = 0,
        interrupted: Callable[[], None] = lambda: None,
        nap: float = NAP,
    ) -> None:
        self._comm, self._rank, self._memory, self._nap = comm, comm.rank, memory, nap
        self._arithmetic, self._payload, self._wire = arithmetic, arithmetic.view(memory), wire
        self._itemsize = len(memory) // max(1, len(self._payload))
        self._tag = tag_of(comm, fingerprint)
        self._interrupted = interrupted
        self._rounds: dict[int, OpenRound] = {}
        self._open: dict[int, int] = {}  # ticket -> requests that have not completed
        self._parcels: dict[int, list[Array | None]] = {}  # ticket -> for each move its parcel, if it has one
        self._requests: list[MPI.Request] = []
        self._owners: list[int] = []
        self._spare: defaultdict[int, list[Array]] = defaultdict(list)  # parcels that are free, by their bytes

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Post the messages of a round. Receives first, so that what comes early lands where it belongs."""
        tag = self._tag + ticket % SPREAD
        parcels = [self._parcel(move) for move in moves]
        for move, parcel in zip(moves, parcels, strict=True):
            if move.action is not Action.SEND:
                buffer = self._stretch(move) if parcel is None else parcel
                self._requests.append(self._comm.Irecv([buffer, MPI.BYTE], move.peer, tag))
        for move, parcel in zip(moves, parcels, strict=True):
            if move.action is Action.SEND:
                if parcel is not None and self._wire is not None:
                    self._wire.pack(self._payload[move.where], parcel)
                buffer = self._stretch(move) if parcel is None else parcel
                self._requests.append(self._comm.Isend([buffer, MPI.BYTE], move.peer, tag))
        self._owners += [ticket] * len(moves)
        self._parcels[ticket] = parcels
        self._rounds[ticket] = OpenRound(moves, [None] * len(moves))
        self._open[ticket] = len(moves)

    def ended(self) -> list[int]:
        """Wait until rounds have ended, with all that they brought in place; their tickets."""
        done: list[int] = []
        while not done:
            for place in sorted(self._completed(), reverse=True):
                self._requests.pop(place)
                ticket = self._owners.pop(place)
                self._open[ticket] -= 1
                if not self._open[ticket]:
                    self._end(ticket)
                    done.append(ticket)
        return done

    def _completed(self) -> list[int]:
        """Wait until some requests have completed; their places."""
        return until(lambda: MPI.Request.Testsome(self._requests), self._interrupted, self._nap)

    def _stretch(self, move: Move) -> Any:
        """The payload's own memory of a move."""
        return self._memory[move.where.start * self._itemsize : move.where.stop * self._itemsize]

    def _parcel(self, move: Move) -> Array | None:
        """What carries a move when the payload's own memory cannot."""
        length = move.where.stop - move.where.start
        if self._wire is not None:
            nbytes = self._wire.nbytes(length)
        elif move.action is Action.ADD:
            nbytes = length * self._itemsize
        else:
            return None
        return self._buffer(nbytes)

    def _buffer(self, nbytes: int) -> Array:
        """One that is free, as long as that: memory that has been touched before costs less than new one."""
        spare = self._spare[nbytes]
        return spare.pop() if spare else np.empty(nbytes, np.uint8)

    def _end(self, ticket: int) -> None:
        """Widen and reduce what has arrived; the buffers are free again."""
        moves, arrivals = self._rounds.pop(ticket)
        parcels = self._parcels.pop(ticket)
        used = [parcel for parcel in parcels if parcel is not None]
        del self._open[ticket]
        for place, (move, parcel) in enumerate(zip(moves, parcels, strict=True)):
            if parcel is None:
                continue
            if self._wire is None:
                arrivals[place] = self._arithmetic.view(parcel)
            elif move.action is Action.RECEIVE:
                self._wire.unpack(parcel, self._payload[move.where])
            elif move.action is Action.ADD:
                used.append(self._buffer((move.where.stop - move.where.start) * self._itemsize))
                wide = arrivals[place] = self._arithmetic.view(used[-1])
                self._wire.unpack(parcel, wide)
        reduce_arrivals(self._rank, self._payload, self._arithmetic, moves, arrivals)
        for buffer in used:
            self._spare[buffer.size].append(buffer)
