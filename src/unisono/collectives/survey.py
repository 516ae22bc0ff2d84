"""Requests for the states of ranks: in shared memory within the node, by messages to other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from unisono.collectives.board import Board
from unisono.collectives.notes import LISTEN, Note, Notes, Question
from unisono.collectives.states import SILENT, Answer, State
from unisono.mpi import MPI

ANSWER = 3.0
"""Seconds that ranks have to answer; their machines may be busy."""


class Survey:
    """Requests and answers on `comm`, which nothing else uses; all its ranks make and free a survey together.

    `node` lists the ranks of this rank's node. `state` returns the own state. `hear` is called with each received note.
    `held` returns True while MPI may block a thread.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: Sequence[int],
        state: Callable[[], State],
        hear: Callable[[Note], None],
        held: Callable[[], bool],
    ) -> None:
        self._comm, self._state = comm, state
        self._board = Board(comm, node)
        self._notes = Notes(comm, hear, state, held) if len(node) < comm.size else None
        self._asked = 0.0
        self.node = self._board.ranks
        """Ranks of this rank's node."""

    @property
    def asked(self) -> bool:
        """True if a rank of the node has asked since this property was last read."""
        return self._board.asked

    def publish(self, state: State) -> None:
        """Write the own state into the shared memory of the node."""
        self._board.write(state)

    def ask(self, ranks: Iterable[int]) -> float:
        """Ask some ranks, and all ranks of the node, for their states; return the time of asking."""
        now = time.monotonic()
        if now - self._asked > ANSWER:  # another wait of this process may have asked, and want the answer
            self._board.ask()
            self._asked = now
        if self._notes is not None:
            self._notes.send(Question(self._comm.rank), set(ranks) - set(self.node))
        return now

    def read_node(self) -> dict[int, Answer]:
        """Return the answers of the ranks of the node."""
        return self._board.read()

    def read(self, ranks: Iterable[int], asked: float) -> dict[int, Answer]:
        """Return the answers of some ranks since they were asked; SILENT for ranks without one."""
        found = self._board.read()
        replies = {} if self._notes is None else self._notes.replies
        for rank in set(ranks) - set(found):
            when, state = replies.get(rank, (0.0, None))
            found[rank] = state if state is not None and (when >= asked or state.ended) else SILENT
        return {rank: found[rank] for rank in ranks}

    def tell(self, note: Note, ranks: Iterable[int]) -> None:
        """Send a note to some ranks, on any nodes."""
        if self._notes is not None:
            self._notes.send(note, ranks)

    def leave(self) -> None:
        """Answer the ranks of other nodes until all ranks have called this, at the end of the program."""
        if self._notes is not None:
            everyone = self._comm.Ibarrier()
            while not everyone.Test():
                time.sleep(LISTEN / 10)
            self._notes.stop()

    def stop(self) -> None:
        """Leave without the other ranks. Nothing is sent afterwards."""
        if self._notes is not None:
            self._notes.stop()
            self._comm.Ibarrier()  # those that end in order wait for it

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        if self._notes is not None:
            self._notes.stop()
            self._notes.drain(self._comm.Ibarrier())
        self._board.free()
