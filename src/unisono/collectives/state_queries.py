"""Requests for the states of ranks: in shared memory within the node, by messages to other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from unisono.collectives.node_states import NodeStates
from unisono.collectives.states import SILENT, Answer, State
from unisono.collectives.watch_messages import POLL_SECONDS, CallNotice, StateQuery, WatchMessages
from unisono.mpi import MPI

REPLY_TIMEOUT_SECONDS = 3.0
"""Seconds that ranks have to answer; their machines may be busy."""


class StateQueries:
    """Requests and answers on `comm`, which nothing else uses; all its ranks make and free it together.

    `node` lists the ranks of this rank's node. `state` returns the own state. `on_notice` is called with each received
    notice. `is_blocked` returns True while MPI may block a thread.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        node: Sequence[int],
        state: Callable[[], State],
        on_notice: Callable[[CallNotice], None],
        is_blocked: Callable[[], bool],
    ) -> None:
        self._comm, self._state = comm, state
        self._node_states = NodeStates(comm, node)
        self._messages = WatchMessages(comm, on_notice, state, is_blocked) if len(node) < comm.size else None
        self._queried = 0.0
        self.node = self._node_states.ranks
        """Ranks of this rank's node."""

    @property
    def queried(self) -> bool:
        """True if a rank of the node has sent a query since this property was last read."""
        return self._node_states.queried

    def publish(self, state: State) -> None:
        """Write the own state into the shared memory of the node."""
        self._node_states.write(state)

    def query(self, ranks: Iterable[int]) -> float:
        """Query the states of some ranks, and of all ranks of the node; return the time of the query."""
        now = time.monotonic()
        if now - self._queried > REPLY_TIMEOUT_SECONDS:  # else another wait of this process expects the answers
            self._node_states.query()
            self._queried = now
        if self._messages is not None:
            self._messages.send(StateQuery(self._comm.rank), set(ranks) - set(self.node))
        return now

    def read_node(self) -> dict[int, Answer]:
        """Return the answers of the ranks of the node."""
        return self._node_states.read()

    def read(self, ranks: Iterable[int], queried: float) -> dict[int, Answer]:
        """Return the answers of some ranks since they were queried; SILENT for ranks without one."""
        found = self._node_states.read()
        replies = {} if self._messages is None else self._messages.replies
        for rank in set(ranks) - set(found):
            when, state = replies.get(rank, (0.0, None))
            found[rank] = state if state is not None and (when >= queried or state.ended) else SILENT
        return {rank: found[rank] for rank in ranks}

    def send(self, notice: CallNotice, ranks: Iterable[int]) -> None:
        """Send a notice to some ranks, on any nodes."""
        if self._messages is not None:
            self._messages.send(notice, ranks)

    def leave(self) -> None:
        """Answer the ranks of other nodes until all ranks have called this, at the end of the program."""
        if self._messages is not None:
            everyone = self._comm.Ibarrier()
            while not everyone.Test():
                time.sleep(POLL_SECONDS / 10)
            self._messages.stop()

    def stop(self) -> None:
        """Leave without the other ranks. Nothing is sent afterwards."""
        if self._messages is not None:
            self._messages.stop()
            self._comm.Ibarrier()  # those that end in order wait for it

    def free(self) -> None:
        """Free the memory; called by all ranks together."""
        if self._messages is not None:
            self._messages.stop()
            self._messages.drain(self._comm.Ibarrier())
        self._node_states.free()
