"""Requests for the states of ranks: in shared memory within the node, by messages to other nodes.

No rank writes or sends until there is a request. A separate thread sends and receives: the MPI library may block it
while another thread of the process waits in the library, and the watch must not be blocked. Shared memory calls no
library.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unisono.collectives.states import DEAD, SILENT, STOPPED, Answer, State, Wait
from unisono.mpi import MPI
from unisono.startup import stat_of
from unisono.transports.window import Window, populate

POLL_SECONDS = 0.2
"""Seconds between two checks for messages."""

REPLY_TIMEOUT_SECONDS = 3.0
"""Seconds that ranks have to answer; their machines may be busy."""

MAX_STATE_BYTES = 32 << 10
"""Largest size of a state in bytes; a longer one is written without the numbers of its worlds."""

REQUESTS, VERSION, LENGTH, HEADER_WORDS = 0, 1, 2, 3

WAITS_KEPT = 4
"""Number of waits that are kept if a state is too long."""


class CallNotice(NamedTuple):
    """Message that a rank waits in a call of a world; with a verdict, that two ranks differ. `rank`: in that world."""

    world: str
    rank: int
    number: int
    description: str
    verdict: str = ""


Message = CallNotice | State | None
"""Message to another rank: a notice, the state of the sender, or None, which requests that of the receiver."""


class StateQueries:
    """Requests and answers on `comm`, which nothing else uses; all its ranks make and free it together.

    `node` lists the ranks of this rank's node. `state` returns the own state. `on_notice` is called with each received
    notice. `is_blocked` returns True while this thread should not call the library.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: Sequence[int],
        state: Callable[[], State],
        on_notice: Callable[[CallNotice], None],
        is_blocked: Callable[[], bool],
    ) -> None:
        self._comm, self._state, self._on_notice, self._is_blocked = comm, state, on_notice, is_blocked
        self.node = NodeStates(comm, node)
        """States of the ranks of the node."""
        self._queried = 0.0
        self._outbox: deque[tuple[Message, int]] = deque()
        self._sending: list[MPI.Request] = []
        self._replies: dict[int, tuple[float, State]] = {}  # time and state of the last reply, by rank
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None  # where there are other nodes
        if len(node) < comm.size:
            self._thread = threading.Thread(target=self._run, name="unisono watch messages", daemon=True)
            self._thread.start()

    def query(self, ranks: Iterable[int]) -> float:
        """Query the states of some ranks, and of all ranks of the node; return the time of the query."""
        now = time.monotonic()
        if now - self._queried > REPLY_TIMEOUT_SECONDS:  # else another wait of this process expects the answers
            self.node.query()
            self._queried = now
        self.send(None, set(ranks) - set(self.node.ranks))
        return now

    def read(self, ranks: Iterable[int], queried: float) -> dict[int, Answer]:
        """Return the answers of some ranks since they were queried; SILENT for ranks without one."""
        answers = self.node.read()
        for rank in set(ranks) - set(answers):
            when, state = self._replies.get(rank, (0.0, None))
            answers[rank] = state if state is not None and (when >= queried or state.ended) else SILENT
        return {rank: answers[rank] for rank in ranks}

    def last_state(self, rank: int) -> State | None:
        """Return the state that a rank has reported last, whenever that was; None if it has reported none."""
        return self.node.written(rank)[1] if rank in self.node.ranks else self._replies.get(rank, (0.0, None))[1]

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        """Queue a message to some ranks; the thread sends it. Without other nodes, nothing is sent."""
        if self._thread is not None:
            self._outbox.extend((message, rank) for rank in ranks if rank != self._comm.rank)

    def leave(self) -> None:
        """Answer the ranks of other nodes until all ranks have called this, at the end of the program."""
        if self._thread is not None:
            everyone = self._comm.Ibarrier()
            while not everyone.Test():
                time.sleep(POLL_SECONDS / 10)
            self._end_thread(self._thread)

    def stop(self) -> None:
        """Leave without the other ranks. Nothing is sent afterwards."""
        if self._thread is not None:
            self._end_thread(self._thread)
            self._comm.Ibarrier()  # those that end in order wait for it

    def free(self) -> None:
        """Free the memory; called by all ranks together. Messages that arrive meanwhile are discarded."""
        if self._thread is not None:
            self._end_thread(self._thread)
            everyone = self._comm.Ibarrier()
            while not everyone.Test():
                self._receive()
            self._receive()
            MPI.Request.Waitall(self._sending)
        self.node.free()

    def _end_thread(self, thread: threading.Thread) -> None:
        self._stop.set()
        thread.join()
        self._send()

    def _run(self) -> None:
        with suppress(MPI.Exception):  # a rank has died, and the library lets the others go on: none is asked any more
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
        status = MPI.Status()
        while self._comm.Iprobe():
            message: Message = self._comm.recv(status=status)
            if message is None:
                self._outbox.append((self._state(), status.Get_source()))
            elif isinstance(message, State):
                self._replies[status.Get_source()] = time.monotonic(), message
            else:
                self._on_notice(message)


class NodeStates:
    """Rows of shared memory, which all ranks of `comm` make and free together. `node` lists the ranks of this node.

    rank 0's row   requests | version | state         a row is written by the watch of its rank alone and read by all
    rank 1's row   requests | version | state

    A tenth of a second or more passes between a write by one rank and the read by another, and Python takes locks
    between any two reads of a thread: no other fence is needed.
    """

    def __init__(self, comm: MPI.Intracomm, node: Sequence[int]) -> None:
        self._comm: MPI.Intracomm = comm.Split(min(node), comm.rank)  # type: ignore[assignment]
        self.ranks = sorted(node)
        """The ranks of the node."""
        self._window = Window(self._comm, 8 * HEADER_WORDS + MAX_STATE_BYTES)
        rows = [memoryview(buffer) for buffer in self._window.buffers]
        self._headers = [line[: 8 * HEADER_WORDS].cast("q") for line in rows]
        self._states = [line[8 * HEADER_WORDS : 8 * HEADER_WORDS + MAX_STATE_BYTES] for line in rows]
        self._own = self._headers[self._comm.rank]
        self._own[:] = memoryview(bytes(8 * HEADER_WORDS)).cast("q")
        # allocated now: where memory has run out, a later write would end this process
        self._room = MAX_STATE_BYTES if populate(np.frombuffer(self._window.own, np.uint8)) else 0
        self._seen_requests = 0
        self._seen: dict[int, int] = {}
        self._processes = self._comm.allgather(os.getpid())
        self._window.sync()
        self._comm.Barrier()

    def query(self) -> None:
        """Request the states of all ranks of the node."""
        self._seen = {rank: int(header[VERSION]) for rank, header in zip(self.ranks, self._headers, strict=True)}
        self._own[REQUESTS] += 1

    @property
    def queried(self) -> bool:
        """True if there was a request since this property was last read."""
        queried = sum(header[REQUESTS] for header in self._headers)
        news, self._seen_requests = queried != self._seen_requests, queried
        return news

    def write(self, state: State) -> None:
        content = json.dumps(state).encode()
        if len(content) > MAX_STATE_BYTES:
            content = json.dumps(state._replace(numbers={}, waits=state.waits[:WAITS_KEPT])).encode()
        if len(content) > self._room:
            return
        self._own[VERSION] += 1  # odd: it is being written
        self._own[LENGTH] = len(content)
        self._states[self._comm.rank][: len(content)] = content
        self._own[VERSION] += 1

    def read(self) -> dict[int, Answer]:
        """Return each rank's answer since the request, or the state of its process where it has not answered."""
        return {rank: self._read(rank, process) for rank, process in zip(self.ranks, self._processes, strict=True)}

    def _read(self, rank: int, process: int) -> Answer:
        version, state = self.written(rank)
        if state is not None and (state.ended or version != self._seen.get(rank)):
            return state
        return process_state(process)

    def written(self, rank: int) -> tuple[int, State | None]:
        """Return what a rank has written last, whenever that was, with its version; None for nothing."""
        index = self.ranks.index(rank)
        header = self._headers[index]
        version = int(header[VERSION])
        if version and version % 2 == 0:
            content = bytes(self._states[index][: header[LENGTH]])
            if header[VERSION] == version:
                call_site, waits, *others = json.loads(content)
                return version, State(call_site, tuple(Wait(*wait) for wait in waits), *others)
        return version, None

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        for view in (*self._headers, *self._states):
            view.release()
        self._window.free()
        self._comm.Free()


def process_state(process: int) -> str:
    """Return STOPPED or DEAD for a process of this node; SILENT if it lives, or if its state cannot be read."""
    if not Path("/proc/self/stat").exists():
        return SILENT
    return {"T": STOPPED, "t": STOPPED, "Z": DEAD, "X": DEAD, "": DEAD}.get(stat_of(process)[0], SILENT)
