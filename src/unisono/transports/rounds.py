"""Open rounds on any transports: once all data of a round has arrived, it is summed in the order of ranks.

round of rank 1     ADD 0 ◀── memory of the node ──┐
                    ADD 3 ◀── message ─────────────┴─▶ 0 + own + 3, then the round's SENDs are waited for
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, copy_of, perform
from unisono.transports.transport import Completion, Move, Transport

WaitFunction = Callable[[Callable[[], list[int]]], list[int]]
"""Function that calls another until it returns tickets, and returns these."""


class OpenRound:
    """Round that has begun: its pending moves, and the data received so far."""

    def __init__(self, moves: Sequence[Move], copied: Sequence[bool]) -> None:
        self.moves = moves
        self.arrivals: list[Any] = [None] * len(moves)
        self.copied = copied
        """For each move, True if it is a SEND whose data was copied out of the payload already."""
        self.unread_sends = sum(copied)
        self.pending = len(moves) - self.unread_sends
        """Number of moves that must complete before received data is summed."""
        self.summed = False
        self.released: set[int] = set()
        """Indices of the moves whose memory is no longer in use."""


class Rounds:
    """Open rounds of one rank's play; `by_peer` holds the transport for each peer.

    `payload` is a flat view of `arithmetic`. `wait` polls until rounds have ended; it may raise to end the wait.
    """

    def __init__(
        self, rank: int, payload: Any, arithmetic: Arithmetic, by_peer: Sequence[Transport], wait: WaitFunction
    ) -> None:
        self._rank, self._payload, self._arithmetic, self._wait = rank, payload, arithmetic, wait
        self._by_peer = by_peer
        self._transports: list[Transport] = list({id(one): one for one in by_peer}.values())
        self._open: dict[int, OpenRound] = {}

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin a round with its transports."""
        moves = [move._replace(position=position) for position, move in enumerate(moves)]
        by_peer = self._by_peer
        copied = [move.action is Action.SEND and by_peer[move.peer].copies for move in moves]
        self._open[ticket] = OpenRound(moves, copied)
        if len(self._transports) == 1:
            self._transports[0].begin(ticket, moves)
            return
        for transport in self._transports:
            if part := [move for move in moves if by_peer[move.peer] is transport]:
                transport.begin(ticket, part)

    def wait_some(self) -> list[int]:
        """Wait until rounds have ended, with received data in place; return their tickets."""
        return self._wait(self._poll)

    def _poll(self) -> list[int]:
        """Poll all transports once; return the tickets whose rounds have ended."""
        done = [one for transport in self._transports for one in transport.completed()]
        if not done:
            return []
        for one in done:
            self._record(one)
        ended = {}
        for ticket in {one.ticket: None for one in done}:
            this = self._open[ticket]
            if not this.pending and not this.summed:
                self._sum(ticket, this)
            if this.summed and not this.unread_sends:
                ended[ticket] = self._open.pop(ticket)
        for ticket, index, data, borrowed in done:  # the sender must not wait for the other moves of this round
            if borrowed and ticket in self._open and not self._open[ticket].summed:
                self._open[ticket].arrivals[index] = copy_of(self._arithmetic, data)
                self._release(ticket, self._open[ticket], index)
        return list(ended)

    def _record(self, done: Completion) -> None:
        """Count a completed move."""
        one = self._open[done.ticket]
        if one.copied[done.position]:
            one.unread_sends -= 1
        else:
            one.pending -= 1
            one.arrivals[done.position] = done.data

    def _sum(self, ticket: int, one: OpenRound) -> None:
        one.summed = True
        reduce_arrivals(self._rank, self._payload, self._arithmetic, one.moves, one.arrivals)
        for index, data in enumerate(one.arrivals):
            if data is not None and index not in one.released:
                self._release(ticket, one, index)
        one.arrivals.clear()

    def _release(self, ticket: int, one: OpenRound, index: int) -> None:
        one.released.add(index)
        self._by_peer[one.moves[index].peer].release(ticket, index)


def reduce_arrivals(
    rank: int, payload: Any, arithmetic: Arithmetic, moves: Sequence[Move], arrivals: Iterable[Any]
) -> None:
    """Reduce the data of a round's ADDs into `payload`, with the rank's own contribution at its position in the order.

    `arrivals` has an entry for each move; entries of other actions are ignored.
    """
    contributions: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for move, data in zip(moves, arrivals, strict=True):
        if move.action is Action.ADD and data is not None:
            contributions.setdefault((move.region.start, move.region.stop), []).append((move.peer, data))
    for (start, stop), parts in contributions.items():
        own = payload[start:stop]
        ordered = sorted([*parts, (rank, own)], key=lambda part: part[0])
        perform(arithmetic.reduce([part for _, part in ordered], own))
