"""Asks ranks what they do: those of the own node in shared memory, those of others by messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from unisono.collectives.board import Board
from unisono.collectives.notes import LISTEN, Note, Notes, Question
from unisono.collectives.states import SILENT, Answer, State
from unisono.mpi import MPI

ANSWER = 3.0
"""Seconds that ranks have to answer: their machines may be busy."""


class Survey:
    """Made and freed by all ranks of `comm` together, which nothing else uses; `node` has those of this rank's node.

    `state` gives the own state, `hear` is given the notes that come, `held` says that MPI may hold a thread.
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
        """The ranks of this rank's node."""

    @property
    def asked(self) -> bool:
        """Whether a rank of the node has asked since this was looked at."""
        return self._board.asked

    def publish(self, state: State) -> None:
        """Write the own state down where the node's ranks see it."""
        self._board.write(state)

    def ask(self, ranks: Iterable[int]) -> float:
        """Ask some ranks, and all of the node, what they do; return when."""
        now = time.monotonic()
        if now - self._asked > ANSWER:  # another wait of this process may have asked, and want the answer
            self._board.ask()
            self._asked = now
        if self._notes is not None:
            self._notes.send(Question(self._comm.rank), set(ranks) - set(self.node))
        return now

    def read_node(self) -> dict[int, Answer]:
        """Read what the ranks of the node have answered."""
        return self._board.read()

    def read(self, ranks: Iterable[int], asked: float) -> dict[int, Answer]:
        """Read what some ranks have answered since they were asked."""
        found = self._board.read()
        replies = {} if self._notes is None else self._notes.replies
        for rank in set(ranks) - set(found):
            when, state = replies.get(rank, (0.0, None))
            found[rank] = state if state is not None and (when >= asked or state.ended) else SILENT
        return {rank: found[rank] for rank in ranks}

    def tell(self, note: Note, ranks: Iterable[int]) -> None:
        """Send a note to some ranks, whatever node they are on."""
        if self._notes is not None:
            self._notes.send(note, ranks)

    def leave(self) -> None:
        """The program ends: answer the ranks of other nodes until all have come to this."""
        if self._notes is not None:
            everyone = self._comm.Ibarrier()
            while not everyone.Test():
                time.sleep(LISTEN / 10)
            self._notes.stop()

    def stop(self) -> None:
        """Leave without the other ranks: no word comes from here any more."""
        if self._notes is not None:
            self._notes.stop()
            self._comm.Ibarrier()  # those that end in order wait for it

    def free(self) -> None:
        """Give the memory back, all ranks together."""
        if self._notes is not None:
            self._notes.stop()
            self._notes.drain(self._comm.Ibarrier())
        self._board.free()
