"""MPI messages as a transport: nonblocking sends and receives, and waits that leave the core to others.

    SEND       the payload's own memory, or a parcel that the wire has encoded
    RECEIVE    into place, or into a parcel that is decoded when it has come
    ADD        into a landing buffer; summed when the whole round has come

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
from typing import Any, NamedTuple, TypeVar

import numpy as np

from unisono.mpi import MPI
from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, Array
from unisono.transports.player import TICKET_SPREAD
from unisono.transports.transport import Done, Move
from unisono.wires.wire import Wire

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
    """The first of the TICKET_SPREAD tags that the messages of a call have."""
    most: Any = comm.Get_attr(MPI.TAG_UB)
    return int(fingerprint % ((most + 1) // TICKET_SPREAD) * TICKET_SPREAD)


class _Posted(NamedTuple):
    """A request that is under way."""

    ticket: int
    move: Move
    buffer: Array | None
    """The parcel or the landing buffer; None where the payload's own memory travels."""


class MessageTransport:
    """Carries the moves of one call on a communicator that nothing else uses.

    `memory` holds the payload as bytes, the same bytes that `arithmetic` sees as numbers. `fingerprint` is a number
    that ranks in the same call have in common.
    """

    copies = False

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: MPI.memory,
        arithmetic: Arithmetic,
        wire: Wire | None = None,
        fingerprint: int = 0,
    ) -> None:
        self._comm, self._memory = comm, memory
        self._arithmetic, self._payload, self._wire = arithmetic, arithmetic.view(memory), wire
        self._itemsize = len(memory) // max(1, len(self._payload))
        self._tag = tag_of(comm, fingerprint)
        self._requests: list[MPI.Request] = []
        self._posted: list[_Posted] = []  # for each request what it carries
        self._landed: dict[tuple[int, int], Array] = {}
        self._spare: defaultdict[int, list[Array]] = defaultdict(list)  # buffers that are free, by their bytes

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Post the messages of a round. Receives first, so that what comes early lands where it belongs."""
        tag = self._tag + ticket % TICKET_SPREAD
        for move in moves:
            if move.action is not Action.SEND:
                buffer = self._buffer_for(move)
                where = self._stretch(move) if buffer is None else buffer
                self._post(self._comm.Irecv([where, MPI.BYTE], move.peer, tag), _Posted(ticket, move, buffer))
        for move in moves:
            if move.action is Action.SEND:
                parcel = None
                if self._wire is not None:
                    parcel = self._buffer(self._wire.nbytes(_length(move)))
                    self._wire.encode(self._payload[move.where], parcel)
                where = self._stretch(move) if parcel is None else parcel
                self._post(self._comm.Isend([where, MPI.BYTE], move.peer, tag), _Posted(ticket, move, parcel))

    def completed(self) -> list[Done]:
        """Look at all requests once."""
        if not self._requests:  # what was sent may still need MPI to move it, while others wait for it
            self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            return []
        places = MPI.Request.Testsome(self._requests)
        if not places:
            return []
        done = [self._take(self._posted[place]) for place in sorted(places)]
        for place in sorted(places, reverse=True):
            del self._requests[place], self._posted[place]
        return done

    def release(self, ticket: int, place: int) -> None:
        """Use the buffer in which this move has landed again."""
        self._free(self._landed.pop((ticket, place)))

    def _post(self, request: MPI.Request, posted: _Posted) -> None:
        self._requests.append(request)
        self._posted.append(posted)

    def _take(self, posted: _Posted) -> Done:
        """Decode what has come."""
        ticket, move, buffer = posted
        if move.action is not Action.ADD:
            if buffer is not None:
                if move.action is Action.RECEIVE and self._wire is not None:
                    self._wire.decode(buffer, self._payload[move.where])
                self._free(buffer)
            return Done(ticket, move.place)
        assert buffer is not None, "what is added lands in a buffer"
        if self._wire is not None:
            parcel, buffer = buffer, self._buffer(_length(move) * self._itemsize)
            self._wire.decode(parcel, self._arithmetic.view(buffer))
            self._free(parcel)
        self._landed[ticket, move.place] = buffer
        return Done(ticket, move.place, self._arithmetic.view(buffer))

    def _stretch(self, move: Move) -> Any:
        """The payload's own memory of a move."""
        return self._memory[move.where.start * self._itemsize : move.where.stop * self._itemsize]

    def _buffer_for(self, move: Move) -> Array | None:
        """Return where a move lands when it cannot land in its place."""
        if self._wire is not None:
            return self._buffer(self._wire.nbytes(_length(move)))
        return self._buffer(_length(move) * self._itemsize) if move.action is Action.ADD else None

    def _buffer(self, nbytes: int) -> Array:
        """One that is free, as long as that: memory that has been touched before costs less than new one."""
        spare = self._spare[nbytes]
        return spare.pop() if spare else np.empty(nbytes, np.uint8)

    def _free(self, buffer: Array) -> None:
        self._spare[buffer.size].append(buffer)


def _length(move: Move) -> int:
    """The elements of a move."""
    return int(move.where.stop - move.where.start)
