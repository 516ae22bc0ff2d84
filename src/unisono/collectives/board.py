"""Shared memory in which the ranks of a node publish their states, when one of them asks.

    rank 0's line   asked | version | state         a line is written by the watch of its rank alone and read by all
    rank 1's line   asked | version | state

No rank writes until one asks; a rank reads all lines to detect a request. Nothing here calls the MPI library, which may
block this process's other threads. A tenth of a second or more passes between a write by one rank and the read by
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

STATE = 32 << 10
"""Largest size of a state in bytes; a longer one is written without the numbers of its worlds."""

ASKED, VERSION, LENGTH, HEAD = 0, 1, 2, 3


class Board:
    """Lines of shared memory; all ranks of `comm` make and free it together. `node` lists the ranks of this node."""

    def __init__(self, comm: MPI.Intracomm, node: Sequence[int]) -> None:
        self._comm: MPI.Intracomm = comm.Split(min(node), comm.rank)  # type: ignore[assignment]
        self.ranks = sorted(node)
        """The ranks of the node."""
        self._window = Window(self._comm, 8 * HEAD + STATE)
        lines = [memoryview(buffer) for buffer in self._window.buffers]
        self._heads = [line[: 8 * HEAD].cast("q") for line in lines]
        self._states = [line[8 * HEAD : 8 * HEAD + STATE] for line in lines]
        self._own = self._heads[self._comm.rank]
        self._own[:] = memoryview(bytes(8 * HEAD)).cast("q")
        self._answered = 0
        self._seen: dict[int, int] = {}
        self._processes = self._comm.allgather(os.getpid())
        self._window.sync()
        self._comm.Barrier()

    def ask(self) -> None:
        """Ask all ranks of the node for their states."""
        self._seen = {rank: int(head[VERSION]) for rank, head in zip(self.ranks, self._heads, strict=True)}
        self._own[ASKED] += 1

    @property
    def asked(self) -> bool:
        """True if a rank has asked since this property was last read."""
        asked = sum(head[ASKED] for head in self._heads)
        news, self._answered = asked != self._answered, asked
        return news

    def write(self, state: State) -> None:
        """Write the state of this rank."""
        content = encode(state)
        if len(content) > STATE:
            content = encode(state._replace(numbers={}, waits=state.waits[:LEAST]))
        self._own[VERSION] += 1  # odd: it is being written
        self._own[LENGTH] = len(content)
        self._states[self._comm.rank][: len(content)] = content
        self._own[VERSION] += 1

    def read(self) -> dict[int, Answer]:
        """Return each rank's answer since it was asked, or the state of its process where it has not answered."""
        return {rank: self._read(place, rank) for place, rank in enumerate(self.ranks)}

    def _read(self, place: int, rank: int) -> Answer:
        head = self._heads[place]
        version = head[VERSION]
        state: State | None = None
        if version and version % 2 == 0:
            content = bytes(self._states[place][: head[LENGTH]])
            if head[VERSION] == version:
                state = decode(content)
        if state is not None and (state.ended or version != self._seen.get(rank)):
            return state
        return process_state(self._processes[place])

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        for view in (*self._heads, *self._states):
            view.release()
        self._window.free()
        self._comm.Free()


LEAST = 4
"""Waits that are kept when a state is too long."""


def process_state(process: int) -> str:
    """Return STOPPED or DEAD for a process of this node; SILENT if it lives, or if its state cannot be read."""
    if not Path("/proc/self/stat").exists():
        return SILENT
    with suppress(OSError):
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": STOPPED, "t": STOPPED, "Z": DEAD, "X": DEAD}.get(letter, SILENT)
    return DEAD
