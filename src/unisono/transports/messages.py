"""MPI messages as a transport: nonblocking sends and receives, and waits that yield the core.

    SEND       the payload's own memory, or a parcel that the wire has encoded
    RECEIVE    into place, or into a parcel that is decoded when it has arrived
    ADD        into a landing buffer; summed when the whole round has arrived

A tag holds the number of the ticket and part of the call's fingerprint. Messages of different calls do not match, so
ranks in different calls wait and get an error (`collectives/watch.py`), instead of summing unrelated data.

A wait polls, and yields the core between polls. After 0.1 ms without progress it sleeps between polls, longer and
longer: the computation of this rank, and the ranks that share its cores, need the cores more. A wait for the library's
own operation on a few bytes sleeps after 2 ms: it is mostly over in less, and a sleep takes longer than it.
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
from unisono.transports.player import TICKET_SPREAD, Completion, Move
from unisono.wires.wire import Wire

Result = TypeVar("Result")

SLEEP_AFTER_SECONDS = 1e-4
"""Seconds without progress after which a wait sleeps between polls."""

SLEEP_AFTER_SECONDS_IN_LIBRARY = 2e-3
"""The same for one operation of the library."""

SLEEP_SECONDS = 1e-4
"""Seconds of such a sleep, if the caller allows no longer one."""


def wait_until(
    poll: Callable[[], Result | None],
    check_interrupt: Callable[[], None],
    max_sleep_seconds: float = SLEEP_SECONDS,
    sleep_after_seconds: float = SLEEP_AFTER_SECONDS,
) -> Result:
    """Call `poll` until its result is true; return the result. `check_interrupt`, called regularly, may raise.

    Sleeps at most `max_sleep_seconds` between two polls.
    """
    start = None
    while not (result := poll()):
        now = time.monotonic()
        start = start or now
        if now - start < sleep_after_seconds:
            os.sched_yield()
        else:
            time.sleep(min(max_sleep_seconds, max(SLEEP_SECONDS, max_sleep_seconds / 4, (now - start) / 2)))
            check_interrupt()
    return result


def wait(request: MPI.Request, check_interrupt: Callable[[], None]) -> None:
    """Wait for one operation of the library."""
    wait_until(request.Test, check_interrupt, sleep_after_seconds=SLEEP_AFTER_SECONDS_IN_LIBRARY)


def tag_of(comm: MPI.Intracomm, fingerprint: int) -> int:
    """Return the first of the TICKET_SPREAD tags for the messages of a call."""
    most: Any = comm.Get_attr(MPI.TAG_UB)
    return int(fingerprint % ((most + 1) // TICKET_SPREAD) * TICKET_SPREAD)


class _PostedRequest(NamedTuple):
    ticket: int
    move: Move
    buffer: Array | None
    """Encoded parcel or landing buffer; None if the message uses the payload's own memory."""


class MessageTransport:
    """Transport for the moves of one call, on a communicator that nothing else uses.

    `memory` holds the payload as bytes, which `arithmetic` views as numbers. `fingerprint` is a number that is equal on
    ranks in the same call.
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
        self._posted: list[_PostedRequest] = []  # for each request its move and buffer
        self._received: dict[tuple[int, int], Array] = {}
        self._spare: defaultdict[int, list[Array]] = defaultdict(list)  # buffers that are free, by their bytes

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Post the messages of a round. Receives are first, so that early messages land in their buffers."""
        tag = self._tag + ticket % TICKET_SPREAD
        for move in moves:
            if move.action is not Action.SEND:
                buffer = self._buffer_for(move)
                memory = self._payload_bytes(move) if buffer is None else buffer
                self._post(self._comm.Irecv([memory, MPI.BYTE], move.peer, tag), _PostedRequest(ticket, move, buffer))
        for move in moves:
            if move.action is Action.SEND:
                encoded = None
                if self._wire is not None:
                    encoded = self._buffer(self._wire.nbytes(_length(move)))
                    self._wire.encode(self._payload[move.region], encoded)
                memory = self._payload_bytes(move) if encoded is None else encoded
                self._post(self._comm.Isend([memory, MPI.BYTE], move.peer, tag), _PostedRequest(ticket, move, encoded))

    def completed(self) -> list[Completion]:
        """Test all requests once; return the completed moves."""
        if not self._requests:  # sent data may still need MPI's progress while others wait for it
            self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            return []
        indices = MPI.Request.Testsome(self._requests)
        if not indices:
            return []
        done = [self._take(self._posted[index]) for index in sorted(indices)]
        for index in sorted(indices, reverse=True):
            del self._requests[index], self._posted[index]
        return done

    def release(self, ticket: int, position: int) -> None:
        """Make the landing buffer of this move available again."""
        self._free(self._received.pop((ticket, position)))

    def _post(self, request: MPI.Request, posted: _PostedRequest) -> None:
        self._requests.append(request)
        self._posted.append(posted)

    def _take(self, posted: _PostedRequest) -> Completion:
        """Decode a received message; return its completed move."""
        ticket, move, buffer = posted
        if move.action is not Action.ADD:
            if buffer is not None:
                if move.action is Action.RECEIVE and self._wire is not None:
                    self._wire.decode(buffer, self._payload[move.region])
                self._free(buffer)
            return Completion(ticket, move.position)
        assert buffer is not None, "an ADD has a landing buffer"
        if self._wire is not None:
            encoded, buffer = buffer, self._buffer(_length(move) * self._itemsize)
            self._wire.decode(encoded, self._arithmetic.view(buffer))
            self._free(encoded)
        self._received[ticket, move.position] = buffer
        return Completion(ticket, move.position, self._arithmetic.view(buffer))

    def _payload_bytes(self, move: Move) -> Any:
        return self._memory[move.region.start * self._itemsize : move.region.stop * self._itemsize]

    def _buffer_for(self, move: Move) -> Array | None:
        """Return the landing buffer of a move; None if it is received in place."""
        if self._wire is not None:
            return self._buffer(self._wire.nbytes(_length(move)))
        return self._buffer(_length(move) * self._itemsize) if move.action is Action.ADD else None

    def _buffer(self, nbytes: int) -> Array:
        """Return a free buffer of `nbytes` bytes, a used one if possible: memory touched before is cheaper than new."""
        spare = self._spare[nbytes]
        return spare.pop() if spare else np.empty(nbytes, np.uint8)

    def _free(self, buffer: Array) -> None:
        self._spare[buffer.size].append(buffer)


def _length(move: Move) -> int:
    return int(move.region.stop - move.region.start)
