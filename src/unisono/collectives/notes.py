"""Messages by which the watches of different nodes ask and answer each other. None is sent while nobody waits for long.

A thread of its own sends and receives: the MPI library may hold it up as long as another thread of the process waits
there, and the watch has to go on.
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
"""Seconds between two looks for news."""


class Note(NamedTuple):
    """A rank waits in a call of a world; or, with a verdict, two ranks differ. `rank` is the one in that world."""

    world: str
    rank: int
    number: int
    words: str
    verdict: str = ""


class Question(NamedTuple):
    """A rank asks for the state of another."""

    rank: int


class Reply(NamedTuple):
    """What it is told."""

    rank: int
    state: State


class Notes:
    """Notes on a communicator that nothing else uses.

    `hear` is given each note that comes, `state` gives the own state; `held` says that this thread should not call the
    library now.
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
        """By rank when it has replied last, and what."""
        self._thread = threading.Thread(target=self._run, name="unisono notes", daemon=True)
        self._thread.start()

    def send(self, note: Note | Question, ranks: Iterable[int]) -> None:
        """Send a note to some ranks."""
        self._outbox.extend((note, rank) for rank in ranks if rank != self._comm.rank)

    def stop(self) -> None:
        """Send what has been said, and end the thread: no word comes from here any more."""
        self._stop.set()
        self._thread.join()
        self._send()

    def drain(self, everyone: MPI.Request) -> None:
        """Throw away what comes until all ranks have ended their threads."""
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
