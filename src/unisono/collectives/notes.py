"""Messages between the watches of different nodes: requests and answers. None is sent while no rank waits for long.

A separate thread sends and receives. The MPI library may block it while another thread of the process waits in the
library, and the watch must not be blocked.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from unisono.collectives.states import State
from unisono.mpi import MPI

LISTEN = 0.2
"""Seconds between two checks for messages."""


class Note(NamedTuple):
    """Message that a rank waits in a call of a world; with a verdict, that two ranks differ. `rank`: in that world."""

    world: str
    rank: int
    number: int
    words: str
    verdict: str = ""


class Question(NamedTuple):
    """Request for the state of another rank."""

    rank: int


class Reply(NamedTuple):
    """Answer to a Question: the state of a rank."""

    rank: int
    state: State


class Notes:
    """Notes on a communicator that nothing else uses.

    `hear` is called with each received note. `state` returns the own state. `held` returns True while this thread
    should not call the library.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        hear: Callable[[Note], None],
        state: Callable[[], State],
        held: Callable[[], bool],
    ) -> None:
        self._comm, self._hear, self._state, self._held = comm, hear, state, held
        self._outbox: deque[tuple[Note | Question | Reply, int]] = deque()
        self._sending: list[MPI.Request] = []
        self._stop = threading.Event()
        self.replies: dict[int, tuple[float, State]] = {}
        """Time and state of the last reply, by rank."""
        self._thread = threading.Thread(target=self._run, name="unisono notes", daemon=True)
        self._thread.start()

    def send(self, note: Note | Question, ranks: Iterable[int]) -> None:
        """Queue a note to some ranks; the thread sends it."""
        self._outbox.extend((note, rank) for rank in ranks if rank != self._comm.rank)

    def stop(self) -> None:
        """End the thread and send the queued notes. Nothing is sent afterwards."""
        self._stop.set()
        self._thread.join()
        self._send()

    def drain(self, everyone: MPI.Request) -> None:
        """Discard incoming notes until all ranks have ended their threads."""
        while not everyone.Test():
            self._receive()
        self._receive()
        MPI.Request.Waitall(self._sending)

    def _run(self) -> None:
        while not self._stop.wait(LISTEN):
            if not self._held():
                self._send()
                self._receive()
                self._send()

    def _send(self) -> None:
        while self._outbox:
            note, rank = self._outbox.popleft()
            self._sending.append(self._comm.isend(note, rank))
        self._sending = [request for request in self._sending if not request.Test()]

    def _receive(self) -> None:
        while self._comm.Iprobe():
            note: Note | Question | Reply = self._comm.recv()
            if isinstance(note, Question):
                self._outbox.append((Reply(self._comm.rank, self._state()), note.rank))
            elif isinstance(note, Reply):
                self.replies[note.rank] = time.monotonic(), note.state
            else:
                self._hear(note)
