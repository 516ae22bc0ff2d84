"""Parcels of any sizes between any ranks, as MPI messages in pieces: some at a time, the first pieces of all parcels
before the second piece of any.

    rank 0   to 1  |■■■■|■■■■|■|      to 2  |■■■■||          a piece shorter than the others is the last of its parcel,
    rank 1   from 0  |■■■■|■■■■|■|                           an empty one where the others have taken all

So no rank waits for a missing piece, and a receiver detects a parcel of another length than it expects. Both ends
process their parcels in the same order, by the distance from the sender's rank to the receiver's. So for any number of
pieces under way, the next piece has been begun at both ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from unisono.errors import MismatchError
from unisono.mpi import MPI
from unisono.transports.arithmetic import Array
from unisono.transports.messages import tag_of, wait_until

IN_FLIGHT = 16
"""Number of pieces under way at once, in each direction."""


class Parcel(NamedTuple):
    """Data for a rank, or memory for data from it; or a piece of either."""

    peer: int
    content: Array
    """Flat array of bytes."""


class _ExpectedPiece(NamedTuple):
    """Expected piece. The last of a parcel is received into a separate buffer, also for one that is too long."""

    piece: Parcel
    separate: Array | None


class Delivery:
    """One delivery on a communicator that nothing else uses; `ranks` are the numbers of its ranks in error messages.

    `fingerprint` is a number that is equal on ranks in the same call. `piece_bytes`, the size of a piece, is equal on
    all ranks. `check_interrupt` is called regularly in waits, and raises to end them. `words` describes the call.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        fingerprint: int,
        piece_bytes: int,
        check_interrupt: Callable[[], None],
        words: str,
    ) -> None:
        self._comm, self._ranks, self._tag, self._words = comm, ranks, tag_of(comm, fingerprint), words
        self._piece_bytes, self._check_interrupt = piece_bytes, check_interrupt
        self._requests: list[MPI.Request] = []
        self._expected_pieces: list[_ExpectedPiece | None] = []  # by request; None for a send
        self._expected: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def transfer(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        """Send and receive all parcels, at most one each per peer. Raises MismatchError if one has another length."""
        rank, size = self._comm.rank, self._comm.size
        outgoing = self._cut(sorted(sends, key=lambda parcel: (parcel.peer - rank) % size))
        incoming = self._cut(sorted(receives, key=lambda parcel: (rank - parcel.peer) % size))
        for peer, content in incoming:
            self._expected[peer] = self._expected.get(peer, 0) + len(content)
        while outgoing or incoming or self._requests:
            arriving = sum(piece is not None for piece in self._expected_pieces)
            leaving = len(self._requests) - arriving
            for _ in range(min(len(incoming), IN_FLIGHT - arriving)):
                self._receive(incoming.popleft())
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

    def _receive(self, piece: Parcel) -> None:
        separate = np.empty(self._piece_bytes, np.uint8) if len(piece.content) < self._piece_bytes else None
        buffer = piece.content if separate is None else separate
        self._begin(self._comm.Irecv([buffer, MPI.BYTE], piece.peer, self._tag), _ExpectedPiece(piece, separate))

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
            raise MismatchError(size_mismatch(self._words, *ranks, sent, self._expected[peer]))
        if separate is not None:
            content[:] = separate[:nbytes]


def size_mismatch(words: str, source: int, target: int, sent: object, expected: int) -> str:
    """Return the error message for a parcel whose sender and receiver disagree about its length in the call `words`."""
    return (
        f"{words}: rank {source} sends {sent} bytes to rank {target}, which expects {expected}: "
        "sent and expected lengths must be equal"
    )
