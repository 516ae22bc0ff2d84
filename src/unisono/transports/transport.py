"""Interface of a transport, which carries the transfers of rounds between this rank and some of its peers.

    begin(ticket, moves)          post sends and receives; never waits
    completed() ── Completion ... moves completed since the last call; never waits
    release(ticket, position)     received data of this move has been summed or copied: its memory may be reused

A round may use several transports, one for each peer (`rounds.py`): shared memory for peers of the same node, messages
for those of other nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from unisono.schedules.schedule import Action


class Move(NamedTuple):
    """Transfer of one piece, with its chunks as a slice of the payload."""

    action: Action
    peer: int
    region: slice
    position: int = 0
    """Index in the round."""


class Completion(NamedTuple):
    """Completed move."""

    ticket: int
    position: int
    data: Any = None
    """Received data of an ADD, to be summed and then released. The data of a RECEIVE is in place."""
    borrowed: bool = False
    """True if the received data is in the peer's memory: the peer waits until it is released."""


class Transport(Protocol):
    """Interface that carries the moves of one play. A ticket numbers a piece and a lane, equally on all ranks."""

    copies: bool
    """True if a SEND is copied out of the payload as it begins: sums then need not wait until it is received."""

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin the moves of a round, in the order of the schedule. Rounds of a ticket follow one another."""

    def completed(self) -> list[Completion]:
        """Poll once, and return the completed moves. A SEND has completed when it was received."""

    def release(self, ticket: int, position: int) -> None:
        """Release the memory of the data received for a move, which may then be reused."""
