"""Open rounds, whatever carries their moves: when all of a round has come it is summed, in the order of ranks.

round of rank 1     ADD 0 ◀── memory of the node ──┐
                    ADD 3 ◀── message ─────────────┴─▶ 0 + own + 3, then the round's SENDs are waited for
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, copy_of, perform
from unisono.transports.transport import Done, Move, Transport

Wait = Callable[[Callable[[], list[int]]], list[int]]
"""Looks until there is something, and returns it."""


class OpenRound:
    """A round that has begun: what it still waits for, and what it has brought so far."""

    def __init__(self, moves: Sequence[Move], copied: Sequence[bool]) -> None:
        self.moves = moves
        self.arrivals: list[Any] = [None] * len(moves)
        self.copied = copied
        """For each move whether it is a SEND that has left the payload already."""
        self.untaken = sum(copied)
        self.missing = len(moves) - self.untaken
        """Moves that have to complete before what came is summed."""
        self.summed = False
        self.released: set[int] = set()
        """Moves whose memory is no longer in use."""


class Rounds:
    """The open rounds of one rank's play; `by_peer` says which transport carries the moves of each peer.

    `payload` is a flat view as `arithmetic` sees it; `wait` looks until rounds have ended, and raises to give up.
    """

    def __init__(
        self, rank: int, payload: Any, arithmetic: Arithmetic, by_peer: Sequence[Transport], wait: Wait
    ) -> None:
        self._rank, self._payload, self._arithmetic, self._wait = rank, payload, arithmetic, wait
        self._by_peer = by_peer
        self._transports: list[Transport] = list({id(one): one for one in by_peer}.values())
        self._open: dict[int, OpenRound] = {}

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Begin a round."""
        moves = [move._replace(place=place) for place, move in enumerate(moves)]
        by_peer = self._by_peer
        copied = [move.action is Action.SEND and by_peer[move.peer].copies for move in moves]
        self._open[ticket] = OpenRound(moves, copied)
        if len(self._transports) == 1:
            self._transports[0].begin(ticket, moves)
            return
        for transport in self._transports:
            if part := [move for move in moves if by_peer[move.peer] is transport]:
                transport.begin(ticket, part)

    def ended(self) -> list[int]:
        """Wait until rounds have ended, with all that they brought in place; return their tickets."""
        return self._wait(self._look)

    def _look(self) -> list[int]:
        """Look at all transports once; return the tickets whose rounds have ended."""
        done = [one for transport in self._transports for one in transport.completed()]
        if not done:
            return []
        for one in done:
            self._count(one)
        ended = {}
        for ticket in {one.ticket: None for one in done}:
            this = self._open[ticket]
            if not this.missing and not this.summed:
                self._sum(ticket, this)
            if this.summed and not this.untaken:
                ended[ticket] = self._open.pop(ticket)
        for ticket, place, arrived, lent in done:  # nobody shall wait for what this round still waits for
            if lent and ticket in self._open and not self._open[ticket].summed:
                self._open[ticket].arrivals[place] = copy_of(self._arithmetic, arrived)
                self._release(ticket, self._open[ticket], place)
        return list(ended)

    def _count(self, done: Done) -> None:
        """Count a move that has completed."""
        one = self._open[done.ticket]
        if one.copied[done.place]:
            one.untaken -= 1
        else:
            one.missing -= 1
            one.arrivals[done.place] = done.arrived

    def _sum(self, ticket: int, one: OpenRound) -> None:
        one.summed = True
        reduce_arrivals(self._rank, self._payload, self._arithmetic, one.moves, one.arrivals)
        for place, arrived in enumerate(one.arrivals):
            if arrived is not None and place not in one.released:
                self._release(ticket, one, place)
        one.arrivals.clear()

    def _release(self, ticket: int, one: OpenRound, place: int) -> None:
        one.released.add(place)
        self._by_peer[one.moves[place].peer].release(ticket, place)


def reduce_arrivals(
    rank: int, payload: Any, arithmetic: Arithmetic, moves: Sequence[Move], arrivals: Iterable[Any]
) -> None:
    """Reduce what the ADDs of a round brought into `payload`, with the rank's own contribution in its place.

    `arrivals` has an entry for each move; those of other actions are not looked at.
    """
    contributions: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    for move, arrived in zip(moves, arrivals, strict=True):
        if move.action is Action.ADD and arrived is not None:
            contributions.setdefault((move.where.start, move.where.stop), []).append((move.peer, arrived))
    for (start, stop), parts in contributions.items():
        own = payload[start:stop]
        ordered = sorted([*parts, (rank, own)], key=lambda part: part[0])
        perform(arithmetic.reduce([part for _, part in ordered], own))
