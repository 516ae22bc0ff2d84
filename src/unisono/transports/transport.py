"""The contract of a transport: it carries the transfers of rounds between this rank and some of its peers.

    begin(ticket, moves)          post sends and receives; never waits
    completed() ── Done, Done     what has completed since the last look; never waits
    release(ticket, place)        what came for this move has been summed or copied: its memory may be used again

A round may have moves of several transports, one for each peer (`rounds.py`): those of the same node through memory,
those of other nodes as messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from unisono.schedules.schedule import Action


class Move(NamedTuple):
    """A transfer of one piece: its chunks have become a stretch of the payload."""

    action: Action
    peer: int
    where: slice
    place: int = 0
    """Its number in the round."""


class Done(NamedTuple):
    """A move that has completed."""

    ticket: int
    place: int
    arrived: Any = None
    """For an ADD what came, to be summed and then released. What a RECEIVE brought is in place."""
    lent: bool = False
    """Whether what came lies in the peer's memory: the peer waits until it is released."""


class Transport(Protocol):
    """Carries the moves of one play. A ticket names a piece and a lane, the same on all ranks."""

    copies: bool
    """Whether a SEND leaves the payload as soon as it begins: then sums need not wait for it to be taken."""

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin the moves of a round, in the order of the schedule. Rounds of a ticket come one after another."""

    def completed(self) -> list[Done]:
        """Look once, and return the moves that have completed: a SEND when it was taken."""

    def release(self, ticket: int, place: int) -> None:
        """Use the memory of what arrived for a move again."""
