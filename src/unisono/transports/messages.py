"""MPI messages, as a transport and as deliveries: nonblocking sends and receives, and waits that yield the core.

    SEND       the payload's own memory, or a parcel that the wire has encoded
    RECEIVE    into place, or into a parcel that is decoded when it has arrived
    ADD        into a landing buffer; summed when the whole round has arrived

A tag holds the number of the ticket and part of the call's fingerprint. Messages of different calls do not match, so
ranks in different calls wait and get an error (`collectives/watch.py`), instead of summing unrelated data.

A wait polls, and yields the core between polls. After 0.1 ms without progress it sleeps between polls, longer and
longer: the computation of this rank, and the ranks that share its cores, need the cores more. A wait for the library's
own operation on a few bytes sleeps after 2 ms: it is mostly over in less, and a sleep takes longer than it.

A delivery sends parcels of any sizes between any ranks in pieces: some at a time, the first pieces of all parcels
before the second piece of any.

    rank 0   to 1  |■■■■|■■■■|■|      to 2  |■■■■||          a piece shorter than the others is the last of its parcel,
    rank 1   from 0  |■■■■|■■■■|■|                           an empty one where the others have taken all

So no rank waits for a missing piece, and a receiver detects a parcel of another length than it expects. Both ends
process their parcels in the same order, by the distance from the sender's rank to the receiver's. So for any number of
pieces under way, the next piece has been begun at both ends.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np

from unisono.errors import MismatchError
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
    wait_until(request.Test, check_interrupt, sleep_after_seconds=SLEEP_AFTER_SECONDS_IN_LIBRARY)


def tag_of(comm: MPI.Intracomm, fingerprint: int) -> int:
    """Return the first of the TICKET_SPREAD tags for the messages of a call."""
    most: Any = comm.Get_attr(MPI.TAG_UB)
    return int(fingerprint % ((most + 1) // TICKET_SPREAD) * TICKET_SPREAD)


_PostedRequest = tuple[int, Move, Array | None]
"""Ticket, move, and its encoded parcel or landing buffer; None if the message uses the payload's own memory."""


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
        wire: Wire | None,
        fingerprint: int,
    ) -> None:
        self._comm, self._memory = comm, memory
        self._arithmetic, self._payload, self._wire = arithmetic, arithmetic.view(memory), wire
        self._itemsize, self._tag = arithmetic.itemsize, tag_of(comm, fingerprint)
        self._requests: list[MPI.Request] = []
        self._posted: list[_PostedRequest] = []  # for each request its move and buffer
        self._received: dict[tuple[int, int], Array] = {}
        self._spare: defaultdict[int, list[Array]] = defaultdict(list)  # buffers that are free, by their bytes

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Post the messages of a round. Receives are first, so that early messages land in their buffers."""
        tag = self._tag + ticket % TICKET_SPREAD
        for move in sorted(moves, key=lambda move: move.action is Action.SEND):
            sends, buffer = move.action is Action.SEND, self._buffer_for(move)
            if sends and self._wire is not None and buffer is not None:
                self._wire.encode(self._payload[move.region], buffer)
            memory = self._payload_bytes(move) if buffer is None else buffer
            post = self._comm.Isend if sends else self._comm.Irecv
            self._requests.append(post([memory, MPI.BYTE], move.peer, tag))
            self._posted.append((ticket, move, buffer))

    def completed(self) -> list[Completion]:
        """Test all requests once; return the completed moves."""
        if not self._requests:  # sent data may still need MPI's progress while others wait for it
            self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
            return []
        indices = sorted(MPI.Request.Testsome(self._requests) or ())
        done = [self._take(self._posted[index]) for index in indices]
        for index in reversed(indices):
            del self._requests[index], self._posted[index]
        return done

    def release(self, ticket: int, position: int) -> None:
        """Make the landing buffer of this move available again."""
        self._free(self._received.pop((ticket, position)))

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
        """Return the buffer of a move's message; None if it is sent from the payload's memory, or received there."""
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


IN_FLIGHT = 16
"""Number of pieces under way at once, in each direction."""


class Parcel(NamedTuple):
    """Data for a rank, or memory for data from it; or a piece of either."""

    peer: int
    content: Array
    """Flat array of bytes."""


_ExpectedPiece = tuple[Parcel, Array | None]
"""Piece, and for the last of a parcel the separate buffer into which it is received: also one that is too long."""


class Delivery:
    """One delivery on a communicator that nothing else uses; `ranks` are the numbers of its ranks in error messages.

    `fingerprint` is a number that is equal on ranks in the same call. `piece_bytes`, the size of a piece, is equal on
    all ranks. `check_interrupt` is called regularly in waits, and raises to end them. `description` is the call's.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        fingerprint: int,
        piece_bytes: int,
        check_interrupt: Callable[[], None],
        description: str,
    ) -> None:
        self._comm, self._ranks, self._tag, self._description = comm, ranks, tag_of(comm, fingerprint), description
        self._piece_bytes, self._check_interrupt = piece_bytes, check_interrupt
        self._requests: list[MPI.Request] = []
        self._expected_pieces: list[_ExpectedPiece | None] = []  # by request; None for a send
        self._expected: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def transfer(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        """Send and receive all parcels; several of one peer are in the same order at both ends, and equally long.

        Raises MismatchError if one has another length.
        """
        rank, size = self._comm.rank, self._comm.size
        outgoing = self._cut(sorted(sends, key=lambda parcel: (parcel.peer - rank) % size))
        incoming = self._cut(sorted(receives, key=lambda parcel: (rank - parcel.peer) % size))
        for peer, content in incoming:
            self._expected[peer] = self._expected.get(peer, 0) + len(content)
        while outgoing or incoming or self._requests:
            arriving = sum(piece is not None for piece in self._expected_pieces)
            leaving = len(self._requests) - arriving
            for _ in range(min(len(incoming), IN_FLIGHT - arriving)):
                piece = incoming.popleft()
                short = len(piece.content) < self._piece_bytes
                separate = np.empty(self._piece_bytes, np.uint8) if short else None
                buffer = piece.content if separate is None else separate
                self._begin(self._comm.Irecv([buffer, MPI.BYTE], piece.peer, self._tag), (piece, separate))
            for _ in range(min(len(outgoing), IN_FLIGHT - leaving)):
                peer, content = outgoing.popleft()
                self._begin(self._comm.Isend([content, MPI.BYTE], peer, self._tag), None)
            self._complete_some()

    def _cut(self, parcels: Iterable[Parcel]) -> deque[Parcel]:
        """Return the pieces of all parcels, the first of each before the second of any."""
        cut = [
            [Parcel(peer, content[at : at + self._piece_bytes]) for at in range(0, len(content) + 1, self._piece_bytes)]
            for peer, content in parcels
        ]
        return deque(piece for nth in zip_longest(*cut) for piece in nth if piece is not None)

    def _begin(self, request: MPI.Request, piece: _ExpectedPiece | None) -> None:
        self._requests.append(request)
        self._expected_pieces.append(piece)

    def _complete_some(self) -> None:
        """Wait until some requests have completed, and store the received pieces."""
        states: list[MPI.Status] = []
        completed = wait_until(lambda: MPI.Request.Testsome(self._requests, states), self._check_interrupt)
        for index, state in zip(completed, states, strict=False):
            piece = self._expected_pieces[index]
            if piece is not None:
                self._take(piece, state.Get_count(MPI.BYTE))
        for index in sorted(completed, reverse=True):
            del self._requests[index], self._expected_pieces[index]

    def _take(self, piece: _ExpectedPiece, nbytes: int) -> None:
        (peer, content), separate = piece
        self._received[peer] = self._received.get(peer, 0) + nbytes
        if nbytes != len(content):
            sent = f"{'at least ' if nbytes == self._piece_bytes else ''}{self._received[peer]}"
            ranks = self._ranks[peer], self._ranks[self._comm.rank]
            raise MismatchError(size_mismatch(self._description, *ranks, sent, self._expected[peer]))
        if separate is not None:
            content[:] = separate[:nbytes]


def size_mismatch(description: str, source: int, target: int, sent: object, expected: int) -> str:
    """Return the error message for a parcel whose sender and receiver disagree about its length, in a call."""
    return (
        f"{description}: rank {source} sends {sent} bytes to rank {target}, which expects {expected}: "
        "sent and expected lengths must be equal"
    )
