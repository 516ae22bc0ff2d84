"""Shared memory as a transport: SEND signals that memory is ready (posted), ADD and RECEIVE read the peer's memory in
place and signal that (taken). There are no intermediate copies.

    rank 0   posts chunk 2 ──▶ posted[0 → 1] = 7
    rank 1   sums it from rank 0's memory ──▶ taken[1 ← 0] = 7      rank 0's SEND has completed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import Arithmetic, perform
from unisono.transports.signals import MAX_LANES, Signals
from unisono.transports.transport import Done, Move


class WindowTransport:
    """Transport for any schedule on payloads in shared memory, one piece at a time. `views` holds the payload of each
    rank, as mapped here."""

    copies = False

    def __init__(self, signals: Signals, views: Sequence[Any], lanes: int, arithmetic: Arithmetic) -> None:
        assert lanes <= MAX_LANES, f"{lanes} lanes on a window, {MAX_LANES} at most"
        self._signals, self._views, self._lanes = signals, views, lanes
        self._arithmetic = arithmetic
        self._own = views[signals.rank]
        self._offered: list[tuple[int, Move, int]] = []
        """SENDs that were not received yet, and the number of receives by the peer that completes them."""
        self._awaited: list[tuple[int, Move]] = []
        self._lent: dict[tuple[int, int], int] = {}  # the peer whose memory a move reads
        self._lending: set[tuple[int, int]] = set()  # lanes and peers

    def begin(self, ticket: int, moves: Sequence[Move]) -> None:
        """Signal the memory of SENDs as ready."""
        lane = ticket % self._lanes
        for move in moves:
            if move.action is Action.SEND:
                self._offered.append((ticket, move, self._signals.post(lane, move.peer)))
            else:
                self._awaited.append((ticket, move))

    def completed(self) -> list[Done]:
        """Check the signals of the peers once, the first awaited move per peer and lane; return completed moves."""
        done: list[Done] = []
        waiting: set[tuple[int, int]] = set()
        awaited, self._awaited = self._awaited, []
        for ticket, move in awaited:
            line = ticket % self._lanes, move.peer
            if line in waiting or line in self._lending or self._signals.posted(*line) <= self._signals.took(*line):
                waiting.add(line)
                self._awaited.append((ticket, move))
            else:
                done.append(self._take(ticket, move))
        offered, self._offered = self._offered, []
        for ticket, move, count in offered:
            if self._signals.taken(ticket % self._lanes, move.peer) >= count:
                done.append(Done(ticket, move.place))
            else:
                self._offered.append((ticket, move, count))
        return done

    def release(self, ticket: int, place: int) -> None:
        """Signal to the peer that its memory was read."""
        line = ticket % self._lanes, self._lent.pop((ticket, place))
        self._lending.remove(line)
        self._signals.take(*line)

    def _take(self, ticket: int, move: Move) -> Done:
        self._signals.fence()
        theirs = self._views[move.peer][move.where]
        if move.action is Action.ADD:
            self._lent[ticket, move.place] = move.peer
            self._lending.add((ticket % self._lanes, move.peer))
            return Done(ticket, move.place, theirs, lent=True)
        perform([self._arithmetic.copy(self._own[move.where], theirs)])
        self._signals.take(ticket % self._lanes, move.peer)
        return Done(ticket, move.place)
