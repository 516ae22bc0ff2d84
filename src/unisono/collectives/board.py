"""Memory in which the ranks of a node tell each other what they do, when one of them asks.

    rank 0's line   asked | version | state         a line is written by the watch of its rank alone and read by all
    rank 1's line   asked | version | state

Nobody writes while nobody asks: a look at all lines tells. No call here goes into the MPI library, which may hold this
process's other threads. A tenth of a second or more lies between what one rank writes and another reads, and Python's
own locks between any two looks of a thread: no other fence is needed.
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
"""Bytes of a state at most; of a longer one the numbers of the worlds are left out."""

ASKED, VERSION, LENGTH, HEAD = 0, 1, 2, 3


class Board:
    """Made and freed by all ranks of `comm` together; `node` has those of this rank's node."""

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
        """Whether somebody has asked since this was looked at."""
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
        """Read what the ranks have answered since they were asked; of those that have not, how their process is."""
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
        """Give the memory back, all ranks together."""
        for view in (*self._heads, *self._states):
            view.release()
        self._window.free()
        self._comm.Free()


LEAST = 4
"""Waits that are kept of a state that is too long."""


def process_state(process: int) -> str:
    """STOPPED, DEAD, or SILENT where a process of this node lives, or the system does not say."""
    if not Path("/proc/self/stat").exists():
        return SILENT
    with suppress(OSError):
        letter = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return {"T": STOPPED, "t": STOPPED, "Z": DEAD, "X": DEAD}.get(letter, SILENT)
    return DEAD
