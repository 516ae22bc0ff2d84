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

POLL_SECONDS = 0.2
"""Seconds between two checks for messages."""


class CallNotice(NamedTuple):
    """Message that a rank waits in a call of a world; with a verdict, that two ranks differ. `rank`: in that world."""

    world: str
    rank: int
    number: int
    words: str
    verdict: str = ""


class StateQuery(NamedTuple):
    """Request for the state of another rank."""

    rank: int


class StateReply(NamedTuple):
    """Answer to a StateQuery: the state of a rank."""

    rank: int
    state: State


class WatchMessages:
    """Messages of watches on a communicator that nothing else uses.

    `on_notice` is called with each received notice. `state` returns the own state. `is_blocked` returns True while this
    thread should not call the library.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        on_notice: Callable[[CallNotice], None],
        state: Callable[[], State],
        is_blocked: Callable[[], bool],
    ) -> None:
        self._comm, self._on_notice, self._state, self._is_blocked = comm, on_notice, state, is_blocked
        self._outbox: deque[tuple[CallNotice | StateQuery | StateReply, int]] = deque()
        self._sending: list[MPI.Request] = []
        self._stop = threading.Event()
        self.replies: dict[int, tuple[float, State]] = {}
        """Time and state of the last reply, by rank."""
        self._thread = threading.Thread(target=self._run, name="unisono watch messages", daemon=True)
        self._thread.start()

    def send(self, message: CallNotice | StateQuery, ranks: Iterable[int]) -> None:
        """Queue a message to some ranks; the thread sends it."""
        self._outbox.extend((message, rank) for rank in ranks if rank != self._comm.rank)

    def stop(self) -> None:
        """End the thread and send the queued messages. Nothing is sent afterwards."""
        self._stop.set()
        self._thread.join()
        self._send()

    def drain(self, everyone: MPI.Request) -> None:
        """Discard incoming messages until all ranks have ended their threads."""
        while not everyone.Test():
            self._receive()
        self._receive()
        MPI.Request.Waitall(self._sending)

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            if not self._is_blocked():
                self._send()
                self._receive()
                self._send()

    def _send(self) -> None:
        while self._outbox:
            message, rank = self._outbox.popleft()
            self._sending.append(self._comm.isend(message, rank))
        self._sending = [request for request in self._sending if not request.Test()]

    def _receive(self) -> None:
        while self._comm.Iprobe():
            message: CallNotice | StateQuery | StateReply = self._comm.recv()
            if isinstance(message, StateQuery):
                self._outbox.append((StateReply(self._comm.rank, self._state()), message.rank))
            elif isinstance(message, StateReply):
                self.replies[message.rank] = time.monotonic(), message.state
            else:
                self._on_notice(message)
