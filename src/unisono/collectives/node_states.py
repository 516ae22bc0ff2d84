"""Shared memory in which the ranks of a node publish their states, when one of them requests it.

    rank 0's row   requests | version | state         a row is written by the watch of its rank alone and read by all
    rank 1's row   requests | version | state

No rank writes until there is a request; a rank reads all rows to detect one. Nothing here calls the MPI library, which
may block this process's other threads. A tenth of a second or more passes between a write by one rank and the read by
another, and Python takes locks between any two reads of a thread: no other fence is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unisono.collectives.states import DEAD, SILENT, STOPPED, Answer, State, decode, encode
from unisono.mpi import MPI
from unisono.transports.window import Window

MAX_STATE_BYTES = 32 << 10
"""Largest size of a state in bytes; a longer one is written without the numbers of its worlds."""

REQUESTS, VERSION, LENGTH, HEADER_WORDS = 0, 1, 2, 3


class NodeStates:
    """Rows of shared memory, which all ranks of `comm` make and free together. `node` lists the ranks of this node."""

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
        """Write the state of this rank."""
        content = encode(state)
        if len(content) > MAX_STATE_BYTES:
            content = encode(state._replace(numbers={}, waits=state.waits[:WAITS_KEPT]))
        self._own[VERSION] += 1  # odd: it is being written
        self._own[LENGTH] = len(content)
        self._states[self._comm.rank][: len(content)] = content
        self._own[VERSION] += 1

    def read(self) -> dict[int, Answer]:
        """Return each rank's answer since the request, or the state of its process where it has not answered."""
        return {rank: self._read(index, rank) for index, rank in enumerate(self.ranks)}

    def _read(self, index: int, rank: int) -> Answer:
        header = self._headers[index]
        version = header[VERSION]
        state: State | None = None
        if version and version % 2 == 0:
            content = bytes(self._states[index][: header[LENGTH]])
            if header[VERSION] == version:
                state = decode(content)
        if state is not None and (state.ended or version != self._seen.get(rank)):
            return state
        return process_state(self._processes[index])

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        for view in (*self._headers, *self._states):
            view.release()
        self._window.free()
        self._comm.Free()


WAITS_KEPT = 4
"""Number of waits that are kept if a state is too long."""


def process_state(process: int) -> str:
    """Return STOPPED or DEAD for a process of this node; SILENT if it lives, or if its state cannot be read."""
    if not Path("/proc/self/stat").exists():
        return SILENT
    with suppress(OSError):
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": STOPPED, "t": STOPPED, "Z": DEAD, "X": DEAD}.get(letter, SILENT)
    return DEAD
