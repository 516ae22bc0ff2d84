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
from unisono.transports.messages import tag_of, until

IN_FLIGHT = 16
"""Number of pieces under way at once, in each direction."""


class Parcel(NamedTuple):
    """Data for a rank, or room for data from it; or a piece of either."""

    peer: int
    content: Array
    """Flat array of bytes."""


class _Landing(NamedTuple):
    """Expected piece. The last of a parcel lands in a separate buffer, which has room for one that is too long."""

    piece: Parcel
    aside: Array | None


class Delivery:
    """One delivery on a communicator that nothing else uses; `ranks` are the numbers of its ranks in error messages.

    `fingerprint` is a number that is equal on ranks in the same call. `largest` is the size of a piece in bytes, equal
    on all ranks. `interrupted` is called regularly in waits, and raises to end them. `words` describes the call.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        fingerprint: int,
        largest: int,
        interrupted: Callable[[], None],
        words: str,
    ) -> None:
        self._comm, self._ranks, self._tag, self._words = comm, ranks, tag_of(comm, fingerprint), words
        self._largest, self._interrupted = largest, interrupted
        self._requests: list[MPI.Request] = []
        self._landings: list[_Landing | None] = []  # for each request what it receives, if it does
        self._expected: dict[int, int] = {}
        self._landed: dict[int, int] = {}

    def carry(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        """Send and receive all parcels, at most one each per peer. Raises MismatchError if one has another length."""
        rank, size = self._comm.rank, self._comm.size
        going = self._cut(sorted(sends, key=lambda parcel: (parcel.peer - rank) % size))
        coming = self._cut(sorted(receives, key=lambda parcel: (rank - parcel.peer) % size))
        for peer, content in coming:
            self._expected[peer] = self._expected.get(peer, 0) + len(content)
        while going or coming or self._requests:
            arriving = sum(landing is not None for landing in self._landings)
            leaving = len(self._requests) - arriving
            for _ in range(min(len(coming), IN_FLIGHT - arriving)):
                self._receive(coming.popleft())
            for _ in range(min(len(going), IN_FLIGHT - leaving)):
                peer, content = going.popleft()
                self._begin(self._comm.Isend([content, MPI.BYTE], peer, self._tag), None)
            self._land()

    def _cut(self, parcels: Iterable[Parcel]) -> deque[Parcel]:
        """Return the pieces of all parcels, the first of each before the second of any."""
        cut = [
            [Parcel(peer, content[at : at + self._largest]) for at in range(0, len(content) + 1, self._largest)]
            for peer, content in parcels
        ]
        return deque(piece for nth in zip_longest(*cut) for piece in nth if piece is not None)

    def _receive(self, piece: Parcel) -> None:
        aside = np.empty(self._largest, np.uint8) if len(piece.content) < self._largest else None
        buffer = piece.content if aside is None else aside
        self._begin(self._comm.Irecv([buffer, MPI.BYTE], piece.peer, self._tag), _Landing(piece, aside))

    def _begin(self, request: MPI.Request, landing: _Landing | None) -> None:
        self._requests.append(request)
        self._landings.append(landing)

    def _land(self) -> None:
        """Wait until some requests have completed, and store the received pieces."""
        states: list[MPI.Status] = []
        completed = until(lambda: MPI.Request.Testsome(self._requests, states), self._interrupted)
        for place, state in zip(completed, states, strict=False):
            landing = self._landings[place]
            if landing is not None:
                self._take(landing, state.Get_count(MPI.BYTE))
        for place in sorted(completed, reverse=True):
            del self._requests[place], self._landings[place]

    def _take(self, landing: _Landing, nbytes: int) -> None:
        (peer, content), aside = landing
        self._landed[peer] = self._landed.get(peer, 0) + nbytes
        if nbytes != len(content):
            goes = f"{'at least ' if nbytes == self._largest else ''}{self._landed[peer]}"
            ranks = self._ranks[peer], self._ranks[self._comm.rank]
            raise MismatchError(sizes_differ(self._words, *ranks, goes, self._expected[peer]))
        if aside is not None:
            content[:] = aside[:nbytes]


def sizes_differ(words: str, source: int, target: int, goes: object, comes: int) -> str:
    """Return the error message for a parcel whose sender and receiver disagree about its length in the call `words`."""
    return (
        f"{words}: rank {source} sends {goes} bytes to rank {target}, which expects {comes}: "
        "what a rank sends must be as long as what the other expects of it"
    )
